"""The Triton kernels on one GPU, as shares of what the card can do, measured in the same run.

python benchmarks/gpu_kernels.py --output result.json
"""

import argparse
import datetime
import functools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from harness import format_table, positive, require_gpu, run
from torch import Tensor
from torch.nn import functional

from mini_infer.kernels import reference
from mini_infer.kernels import triton as kernels
from mini_infer.kernels.metadata import AttentionMetadata, Rope
from mini_infer.kernels.triton import attention, split_attention

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
BLOCK = 16
COLD_BYTES = 1 << 30
"""Inputs are rotated until they exceed every cache."""
QWEN_7B, QWEN_SMALL, LLAMA_2_7B = (28, 4, 128), (16, 8, 128), (32, 32, 128)
"""Query heads, key-value heads, head size."""
MIXED = [32768, *[500] * 31]
DECODES = {
    "Qwen2.5-7B": (QWEN_7B, [[256], [4096], [32768], [1024] * 32, [600] * 128, MIXED]),
    "Qwen3-0.6B": (QWEN_SMALL, [[256], [4096], [32768], [1024] * 32, [576] * 128, [900] * 256]),
    "Llama-2-7B": (LLAMA_2_7B, [[4096], [32768]]),
}
HEAD_NORMS = ("Qwen3-0.6B",)
MOST_CALLS = 200
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


def random_caches(num_blocks: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values as the engine lays them out: a head's part of a block is one piece."""
    pair = random(num_blocks, 2, kv_heads, BLOCK, head_dim)
    return pair[:, 0].transpose(1, 2), pair[:, 1].transpose(1, 2)


def random_rope(positions: Tensor, head_dim: int) -> Rope:
    angles = torch.rand(int(positions.max()) + 1, head_dim // 2, device=DEVICE)
    return Rope(torch.cat((angles.cos(), angles.sin()), -1), positions)


def step(query_len: int, contexts: Sequence[int]) -> tuple[AttentionMetadata, int]:
    """Rows over scrambled blocks, and the number of those."""
    batch, counts = len(contexts), [-(-context // BLOCK) for context in contexts]
    table = torch.zeros(batch, max(counts), dtype=torch.int32)
    for row, blocks in enumerate(torch.randperm(sum(counts)).int().split(counts)):
        table[row, : len(blocks)] = blocks
    seqlens = torch.tensor(contexts)
    last = table[torch.arange(batch), (seqlens - 1) // BLOCK].long()
    meta = AttentionMetadata(
        cu_seqlens_q=torch.arange(batch + 1, device=DEVICE) * query_len,
        seqlens_k=seqlens.to(DEVICE),
        block_table=table.to(DEVICE),
        slot_mapping=(last * BLOCK + (seqlens - 1) % BLOCK).to(DEVICE),
        max_query_len=query_len,
        max_seqlen_k=max(contexts),
        query_lens=(query_len,) * batch,
        context_lens=tuple(contexts),
        backend="triton",
    )
    return meta, sum(counts)


def decode_rows(timer: Timer, bandwidth: float) -> list[dict[str, Any]]:
    """From the packed projection to the output: norm (Qwen3), rotary, cache write, attention.

    The calls follow each other as a model's layers do, each on keys and values of its own.
    """
    rows = []
    for name, ((heads, kv_heads, head_dim), cases) in DECODES.items():
        for contexts in cases:
            meta, num_blocks = step(1, contexts)
            kv_bytes = 2 * sum(contexts) * kv_heads * head_dim * DTYPE.itemsize
            rope, scale = random_rope(meta.seqlens_k - 1, head_dim), head_dim**-0.5
            qk_norm = (random(head_dim), random(head_dim), 1e-6) if name in HEAD_NORMS else None
            calls = []
            for _ in range(min(MOST_CALLS, max(2, COLD_BYTES // kv_bytes))):
                k_cache, v_cache = random_caches(num_blocks, kv_heads, head_dim)
                qkv = random(len(contexts), heads + 2 * kv_heads, head_dim)
                arguments = (qkv, rope, k_cache, v_cache, meta, scale, None, qk_norm)
                calls.append(functools.partial(kernels.decode_attention, *arguments))
            seconds = timer(*calls)
            unsplit = without_splits(timer, calls)
            rows.append(
                {
                    "decode attention": name,
                    "batch": len(contexts),
                    "context": "-".join(str(length) for length in sorted({*contexts})),
                    "us": seconds * 1e6,
                    "TB/s": kv_bytes / seconds / 1e12,
                    "of read bandwidth": kv_bytes / seconds / bandwidth,
                    "us without splits": unsplit * 1e6,
                    "speed-up": unsplit / seconds,
                }
            )
    return rows


def without_splits(timer: Timer, calls: Sequence[Callable[[], Tensor]]) -> float:
    """One program for each row and key-value head."""
    split_attention.SPLITS = False
    try:
        return timer(*calls)
    finally:
        split_attention.SPLITS = True


def prefill_rows(timer: Timer, rate: float) -> list[dict[str, Any]]:
    rows = []
    for name, (heads, kv_heads, head_dim) in PREFILLS.items():
        for batch, length in ((1, 2048), (8, 2048)):
            meta, num_blocks = step(length, [length] * batch)
            caches = random_caches(num_blocks, kv_heads, head_dim)
            arguments = (random(batch * length, heads, head_dim), *caches, meta, head_dim**-0.5)
            seconds = timer(functools.partial(attention.paged_attention, *arguments))
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
    for tokens in (32, 8192):
        x, weight, gate_up = random(tokens, 3584), random(3584), random(tokens, 2 * 18944)
        qkv = random(tokens, heads + 2 * kv_heads, head_dim)
        caches = random_caches(1024, kv_heads, head_dim)
        slots = torch.randperm(1024 * BLOCK, device=DEVICE)[:tokens]
        rope = random_rope(torch.arange(tokens, device=DEVICE), head_dim)

        def separately(qkv: Tensor = qkv, rope: Rope = rope, rest: Any = (*caches, slots)) -> None:
            qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
            turned = reference.apply_rotary(qk, *rope.cos_sin(DTYPE))
            reference.write_kv(turned[:, heads:], v, *rest)

        for name, arguments, in_torch, values in (
            ("rms_norm", (x, weight, 1e-6), reference.rms_norm, 2 * x.numel()),
            ("silu_and_mul", (gate_up,), reference.silu_and_mul, 1.5 * gate_up.numel()),
            (
                "rotary_and_write_kv",
                (qkv, rope, *caches, slots),
                lambda *_, separately=separately: separately(),
                2 * qkv.numel(),
            ),
        ):
            seconds = timer(functools.partial(getattr(kernels, name), *arguments))
            torch_seconds = timer(functools.partial(in_torch, *arguments))
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
    require_gpu()
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
    run(main)
