"""Measures the limits of the processor that a benchmark runs on, in the same run."""

import statistics
import time
from collections.abc import Callable

import torch
from limits import Card

REPEATS = 7
GPU_READ_BYTES = 2 << 30
GPU_SIDE, GPU_PRODUCTS = 8192, 20
"""Long enough (a fifth of a second) for the clock that the power limit allows under load."""
CPU_READ_BYTES = 64 << 20
CPU_SIDE = 512


def measure_card(device: str = "auto") -> Card:
    """Read bandwidth and the rate of a large product: bfloat16 on a GPU, float32 on a CPU.

    Leaves no memory taken, so it can come before an engine.
    """
    if device == "cpu" or not torch.cuda.is_available():
        return Card("CPU", _cpu_bandwidth(), _cpu_rate())
    card = Card(torch.cuda.get_device_name(), _gpu_bandwidth(), _gpu_rate())
    torch.cuda.empty_cache()
    return card


def _gpu_bandwidth() -> float:
    from card_kernels import TILE, TILES_PER_PROGRAM, read_all

    source = torch.randn(GPU_READ_BYTES // 2 // 64, dtype=torch.bfloat16, device="cuda").repeat(64)
    target = torch.empty(source.numel() // (TILE * TILES_PER_PROGRAM), device="cuda")
    seconds = _gpu_seconds(lambda: read_all(source, target))
    return source.numel() * source.element_size() / seconds


def _gpu_rate() -> float:
    left, right = (
        torch.randn(GPU_SIDE, GPU_SIDE, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    out = torch.empty_like(left)

    def products() -> None:
        for _ in range(GPU_PRODUCTS):
            torch.mm(left, right, out=out)

    return 2 * GPU_PRODUCTS * GPU_SIDE**3 / _gpu_seconds(products)


def _gpu_seconds(call: Callable[[], None]) -> float:
    call()  # compiles, and chooses an algorithm
    times = []
    for _ in range(REPEATS):
        begin, end = _event(), _event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1000)
    return statistics.median(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _cpu_bandwidth() -> float:
    source = torch.ones(CPU_READ_BYTES // 4)
    return CPU_READ_BYTES / _cpu_seconds(lambda: source.sum())


def _cpu_rate() -> float:
    left, right = torch.ones(CPU_SIDE, CPU_SIDE), torch.ones(CPU_SIDE, CPU_SIDE)
    return 2 * CPU_SIDE**3 / _cpu_seconds(lambda: left @ right)


def _cpu_seconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
