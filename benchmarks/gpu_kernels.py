"""The Triton kernels on one GPU, as shares of what the card can do, measured in the same run.

python benchmarks/gpu_kernels.py --output result.json
"""

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from harness import format_table, positive
from torch import Tensor
from torch.nn import functional

from mini_infer.kernels import reference
from mini_infer.kernels import triton as kernels
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.kernels.triton import attention

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
BLOCK = 16
COLD_BYTES = 256 << 20
"""Inputs are rotated until they exceed every cache."""
QWEN_7B, QWEN_SMALL, LLAMA_8B = (28, 4, 128), (16, 8, 128), (32, 8, 128)
DECODES = {
    "Qwen2.5-7B": (QWEN_7B, [(1, 4096), (1, 32768), (32, 1024), (128, 600)]),
    "Qwen3-0.6B": (QWEN_SMALL, [(1, 4096), (1, 32768), (32, 1024)]),
    "Llama-3.1-8B": (LLAMA_8B, [(1, 4096), (1, 32768)]),
}
PREFILLS = {"Qwen2.5-7B": QWEN_7B, "Qwen3-0.6B": QWEN_SMALL}


@triton.jit
def read_kernel(source, target, steps: tl.constexpr, tile: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([tile], tl.float32)
    for step in range(steps):
        offset = (program * steps + step) * tile + tl.arange(0, tile)
        total += tl.load(source + offset).to(tl.float32)
    tl.store(target + program, tl.sum(total, 0))


class Timer:
    """Medians over replays of a graph, so that launches from the host do not count."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats

    def __call__(self, *calls: Callable[[], Any]) -> float:
        """Seconds of one call; several calls of the same work on different inputs are rotated."""
        rounds = max(1, 20 // len(calls))
        calls[0]()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls * rounds:
                call()
        graph.replay()
        times = []
        for _ in range(self.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / rounds / len(calls))
        return statistics.median(times)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


def read_bandwidth(timer: Timer) -> float:
    """Bytes per second of a kernel that only reads 4 GiB."""
    tile, steps, programs = 4096, 8, 2**16
    source = random(programs * steps * tile // 64).repeat(64)
    target = torch.empty(programs, device=DEVICE)

    def read() -> None:
        read_kernel[programs,](source, target, steps=steps, tile=tile, num_warps=8)

    return source.numel() * source.element_size() / timer(read)


def matrix_rate(timer: Timer) -> float:
    """Floating-point operations per second of a large bf16 product."""
    a, b = random(8192, 8192), random(8192, 8192)
    return 2 * 8192**3 / timer(lambda: a @ b)


def step(query_len: int, context: int, batch: int) -> tuple[AttentionMetadata, int]:
    """Rows of one length over scrambled blocks, and the number of those."""
    per_row = -(-context // BLOCK)
    table = torch.randperm(batch * per_row).int().view(batch, per_row)
    meta = AttentionMetadata(
        cu_seqlens_q=torch.arange(batch + 1, device=DEVICE) * query_len,
        seqlens_k=torch.full((batch,), context, device=DEVICE),
        block_table=table.to(DEVICE),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=DEVICE),
        max_query_len=query_len,
        max_seqlen_k=context,
        query_lens=(query_len,) * batch,
        context_lens=(context,) * batch,
        backend="triton",
    )
    return meta, batch * per_row


def decode_rows(timer: Timer, bandwidth: float) -> list[dict[str, Any]]:
    rows = []
    for name, ((heads, kv_heads, head_dim), cases) in DECODES.items():
        for batch, context in cases:
            meta, num_blocks = step(1, context, batch)
            kv_bytes = 2 * batch * context * kv_heads * head_dim * DTYPE.itemsize
            calls = []
            for _ in range(max(2, COLD_BYTES // kv_bytes)):
                pair = random(num_blocks, BLOCK, 2 * kv_heads, head_dim)
                caches = pair[:, :, :kv_heads], pair[:, :, kv_heads:]
                q, scale = random(batch, heads, head_dim), head_dim**-0.5
                calls.append(attend(q, caches, meta, scale))
            seconds = timer(*calls)
            unsplit = without_splits(timer, calls)
            rows.append(
                {
                    "decode attention": name,
                    "batch": batch,
                    "context": context,
                    "us": seconds * 1e6,
                    "TB/s": kv_bytes / seconds / 1e12,
                    "of read bandwidth": kv_bytes / seconds / bandwidth,
                    "us without splits": unsplit * 1e6,
                    "speed-up": unsplit / seconds,
                }
            )
    return rows


def attend(
    q: Tensor, caches: tuple[Tensor, Tensor], meta: AttentionMetadata, scale: float
) -> Callable[[], Tensor]:
    return lambda: attention.paged_attention(q, *caches, meta, scale)


def without_splits(timer: Timer, calls: Sequence[Callable[[], Tensor]]) -> float:
    most, attention.MAX_SPLITS = attention.MAX_SPLITS, 1
    try:
        return timer(*calls)
    finally:
        attention.MAX_SPLITS = most


def prefill_rows(timer: Timer, rate: float) -> list[dict[str, Any]]:
    rows = []
    for name, (heads, kv_heads, head_dim) in PREFILLS.items():
        for batch, length in ((1, 2048), (8, 2048)):
            meta, num_blocks = step(length, length, batch)
            pair = random(num_blocks, BLOCK, 2 * kv_heads, head_dim)
            caches = pair[:, :, :kv_heads], pair[:, :, kv_heads:]
            q = random(batch * length, heads, head_dim)
            seconds = timer(attend(q, caches, meta, head_dim**-0.5))
            dense = [random(batch, heads, length, head_dim) for _ in range(3)]
            sdpa = timer(
                lambda dense=dense: functional.scaled_dot_product_attention(*dense, is_causal=True)
            )
            flops = 2 * batch * heads * head_dim * length * length
            rows.append(
                {
                    "prefill attention": name,
                    "batch": batch,
                    "tokens": length,
                    "us": seconds * 1e6,
                    "TFLOP/s": flops / seconds / 1e12,
                    "of matrix rate": flops / seconds / rate,
                    "us torch SDPA, no pages": sdpa * 1e6,
                    "speed-up": sdpa / seconds,
                }
            )
    return rows


def layer_rows(timer: Timer, bandwidth: float) -> list[dict[str, Any]]:
    """The kernels between the matrix products, at the sizes of Qwen2.5-7B."""
    heads, kv_heads, head_dim = QWEN_7B
    rows = []
    for tokens in (1, 32, 8192):
        x, residual, weight = random(tokens, 3584), random(tokens, 3584), random(3584)
        gate_up = random(tokens, 2 * 18944)
        qkv = random(tokens, heads + 2 * kv_heads, head_dim)
        cos, sin = random(tokens, 1, head_dim), random(tokens, 1, head_dim)
        pair = random(1024, BLOCK, 2 * kv_heads, head_dim)
        caches = pair[:, :, :kv_heads], pair[:, :, kv_heads:]
        slots = torch.randperm(1024 * BLOCK, device=DEVICE)[:tokens]

        def separate(
            implementation: Any,
            qkv: Tensor = qkv,
            rope: Any = (cos, sin),
            rest: Any = (*caches, slots),
        ) -> None:
            qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
            turned = implementation.apply_rotary(qk, *rope)
            implementation.write_kv(turned[:, heads:], v, *rest)

        def norm(implementation: Any, arguments: Any = (x, residual, weight, 1e-6)) -> None:
            implementation.add_rms_norm(*arguments)

        def gate(implementation: Any, gate_up: Tensor = gate_up) -> None:
            implementation.silu_and_mul(gate_up)

        def fused(_: Any, arguments: Any = (qkv, cos, sin, *caches, slots)) -> None:
            kernels.rotary_and_write_kv(*arguments)

        for name, run, slow, values in (
            ("add_rms_norm", norm, norm, 4 * x.numel()),
            ("silu_and_mul", gate, gate, 1.5 * gate_up.numel()),
            ("apply_rotary + write_kv", separate, separate, 3.5 * qkv.numel()),
            ("rotary_and_write_kv", fused, separate, 2 * qkv.numel()),
        ):
            seconds = timer(lambda run=run: run(kernels))
            torch_seconds = timer(lambda slow=slow: slow(reference))
            rows.append(
                {
                    "layer kernel": name,
                    "tokens": tokens,
                    "us": seconds * 1e6,
                    "of read bandwidth": values * DTYPE.itemsize / seconds / bandwidth,
                    "us torch": torch_seconds * 1e6,
                    "speed-up": torch_seconds / seconds,
                }
            )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=positive, default=9, help="medians are over these")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("this benchmark measures a GPU, and torch sees none")
    timer = Timer(arguments.repeats)
    bandwidth, rate = read_bandwidth(timer), matrix_rate(timer)
    tables = {
        "decode attention": decode_rows(timer, bandwidth),
        "prefill attention": prefill_rows(timer, rate),
        "layer kernels": layer_rows(timer, bandwidth),
    }
    setup = {
        "gpu": torch.cuda.get_device_name(),
        "read TB/s": bandwidth / 1e12,
        "bf16 TFLOP/s": rate / 1e12,
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
        result = {"benchmark": "gpu_kernels", **setup, "tables": tables}
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
