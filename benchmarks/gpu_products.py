"""The matrix products of a decode step on one GPU, against the library's and the card's bandwidth.

python benchmarks/gpu_products.py --output result.json
"""

import argparse
import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from gpu_kernels import COLD_BYTES, Timer, random, read_bandwidth
from harness import format_table, positive, require_gpu, run
from torch import Tensor
from torch.nn import functional

from mini_infer.kernels import ops
from mini_infer.kernels import triton as kernels
from mini_infer.kernels.triton.compile_ahead import compile_ahead

STEP_ROWS = (1, 2, 4, 8, 16, 32, 64)
PRODUCT_ROWS = (1, 8, 32)
EPS = 1e-6


class Sizes(NamedTuple):
    """Outputs and inputs of a model's products."""

    hidden: int
    qkv: int
    heads: int
    inner: int
    vocab: int
    layers: int
    bias: bool


MODELS = {
    "Qwen2.5-7B": Sizes(3584, 4608, 3584, 18944, 152064, 28, True),
    "Qwen2.5-1.5B": Sizes(1536, 2048, 1536, 8960, 151936, 28, True),
    "Qwen3-0.6B": Sizes(1024, 4096, 2048, 3072, 151936, 28, False),
    "SmolLM2-135M": Sizes(576, 960, 576, 1536, 49152, 30, False),
}


def weights(num_outputs: int, size: int) -> Tensor:
    """Outputs as large as inputs: what a layer adds neither vanishes nor explodes."""
    return random(num_outputs, size).mul_(size**-0.5)


class Layer(NamedTuple):
    """Weights of one layer's products; no weights are shared, so none is in a cache."""

    norm: Tensor
    qkv: Tensor
    bias: Tensor | None
    o: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, sizes: Sizes) -> "Layer":
        return cls(
            random(sizes.hidden),
            weights(sizes.qkv, sizes.hidden),
            random(sizes.qkv) if sizes.bias else None,
            weights(sizes.hidden, sizes.heads),
            weights(2 * sizes.inner, sizes.hidden),
            weights(sizes.hidden, sizes.inner),
        )


class Library:
    """The same three operations with the library's products, and kernels for norm and gate."""

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Any = None) -> Tensor:
        return functional.linear(x if norm is None else kernels.rms_norm(x, *norm), weight, bias)

    @staticmethod
    def add_linear_(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return residual.addmm_(x, weight.t())

    @staticmethod
    def gated_linear(x: Tensor, weight: Tensor, norm: Any) -> Tensor:
        return kernels.silu_and_mul(Library.linear(x, weight, norm=norm))


def products(
    implementation: Any, layer: Layer, sizes: Sizes, num_rows: int
) -> dict[str, tuple[Tensor, Callable[[], Any]]]:
    """By name: the weight, and the product with fresh activations."""
    x, residual = random(num_rows, sizes.hidden), random(num_rows, sizes.hidden)
    heads, inner = random(num_rows, sizes.heads), random(num_rows, sizes.inner)
    norm = (layer.norm, EPS)
    return {
        "norm, qkv": (
            layer.qkv,
            lambda: implementation.linear(x, layer.qkv, layer.bias, norm),
        ),
        "o, residual": (layer.o, lambda: implementation.add_linear_(residual, heads, layer.o)),
        "norm, gate_up, gate": (
            layer.gate_up,
            lambda: implementation.gated_linear(x, layer.gate_up, norm=norm),
        ),
        "down, residual": (
            layer.down,
            lambda: implementation.add_linear_(residual, inner, layer.down),
        ),
    }


def product_rows(timer: Timer, bandwidth: float, model: str) -> list[dict[str, Any]]:
    """Each product by itself, over as many layers as no cache holds."""
    sizes, rows = MODELS[model], []
    per_layer = sum(weight.nbytes for weight in Layer.of(sizes) if weight is not None)
    layers = [Layer.of(sizes) for _ in range(max(2, -(-COLD_BYTES // per_layer)))]
    for num_rows in PRODUCT_ROWS:
        ours, library = (
            [products(implementation, layer, sizes, num_rows) for layer in layers]
            for implementation in (ops, Library)
        )
        for name, (weight, _) in ours[0].items():
            seconds = timer(*(calls[name][1] for calls in ours))
            library_seconds = timer(*(calls[name][1] for calls in library))
            rows.append(
                {
                    "product": f"{model}: {name}",
                    "rows": num_rows,
                    "us": seconds * 1e6,
                    "TB/s": weight.nbytes / seconds / 1e12,
                    "of read bandwidth": weight.nbytes / seconds / bandwidth,
                    "us library": library_seconds * 1e6,
                    "speed-up": library_seconds / seconds,
                    "taken": taken(num_rows, weight),
                }
            )
    return rows


def taken(num_rows: int, weight: Tensor) -> str:
    return "ours" if kernels.is_skinny(num_rows, weight) else "library"


def step_rows(timer: Timer, bandwidth: float, model: str) -> list[dict[str, Any]]:
    """All products of a decode step in their order, without attention."""
    sizes, rows = MODELS[model], []
    layers = [Layer.of(sizes) for _ in range(sizes.layers)]
    head, head_norm = weights(sizes.vocab, sizes.hidden), random(sizes.hidden)
    num_bytes = head.nbytes + sum(
        weight.nbytes for layer in layers for weight in layer if weight is not None
    )

    def step(implementation: Any, num_rows: int) -> Callable[[], None]:
        residual, attended = random(num_rows, sizes.hidden), random(num_rows, sizes.heads)

        def run() -> None:
            for layer in layers:
                norm = (layer.norm, EPS)
                implementation.linear(residual, layer.qkv, layer.bias, norm)
                implementation.add_linear_(residual, attended, layer.o)
                gated = implementation.gated_linear(residual, layer.gate_up, norm=norm)
                implementation.add_linear_(residual, gated, layer.down)
            implementation.linear(residual, head, norm=(head_norm, EPS))

        return run

    steps = {rows: step(ops, rows) for rows in STEP_ROWS}
    with compile_ahead():
        for run in steps.values():
            run()
    for num_rows, run in steps.items():
        seconds, library_seconds = timer(run), timer(step(Library, num_rows))
        rows.append(
            {
                "products of a step": model,
                "rows": num_rows,
                "ms": seconds * 1e3,
                "TB/s": num_bytes / seconds / 1e12,
                "of read bandwidth": num_bytes / seconds / bandwidth,
                "ms library": library_seconds * 1e3,
                "speed-up": library_seconds / seconds,
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=positive, default=3, help="medians are over these")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args(argv)
    require_gpu()
    timer = Timer(arguments.repeats)
    bandwidth = read_bandwidth(timer)
    tables: dict[str, list[dict[str, Any]]] = {"products of a step": [], "products": []}
    for model in MODELS:
        tables["products of a step"] += step_rows(timer, bandwidth, model)
        tables["products"] += product_rows(timer, bandwidth, model)
    setup = {
        "gpu": torch.cuda.get_device_name(),
        "read TB/s": bandwidth / 1e12,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "repeats": arguments.repeats,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    print(", ".join(f"{name} {value}" for name, value in setup.items()))
    for rows in tables.values():
        print(f"\n{format_table(rows)}")
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        result = {"benchmark": "gpu_products", **setup, "tables": tables}
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
