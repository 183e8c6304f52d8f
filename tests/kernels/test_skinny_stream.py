"""Streamed products: where they are planned, and that they compile. No interpreter runs Gluon, so
what they compute is tested in ``tests/gpu`` only."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
# Here already, while the language that it is made of is not yet an interpreter's (see fake_gpu).
pytest.importorskip("triton.experimental.gluon.language")

from triton.runtime.jit import JITFunction  # noqa: E402

from mini_infer.kernels.triton import launch, skinny_plans  # noqa: E402
from tests.kernels.fake_gpu import fake_gpu  # noqa: E402

HOPPER, PROCESSORS = torch.device("cuda", 0), 132
SHARED_BY_TWO = (228 << 10) // 2 - 1024
"""Bytes of shared memory for each of two programs of a processor; the system takes 1 KiB each."""
QKV, OUTPUT, GATE_UP, DOWN, HEAD = (
    (4608, 3584),
    (3584, 3584),
    (2 * 18944, 3584),
    (3584, 18944),
    (152064, 3584),
)
"""Qwen2.5-7B."""
SMALL_GATE_UP = (2 * 8960, 1536)
"""Qwen2.5-1.5B."""


def weight_of(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_plans, "runs_hopper_gluon", lambda device: True)
    monkeypatch.setattr(skinny_plans, "num_sms", lambda device: PROCESSORS)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("shape", "gated", "rows"),
    [
        (QKV, False, (9, 16)),
        (OUTPUT, False, (9, 16)),
        (DOWN, False, (9, 16)),
        (GATE_UP, True, (9, 16)),
        (GATE_UP, True, (33, 64)),
        (HEAD, False, (9, 16)),
        (HEAD, False, (33, 64)),
        (SMALL_GATE_UP, True, (9, 32)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_that_are_streamed(
    shape: tuple[int, int], gated: bool, rows: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = weight_of(shape, dtype)
    for num_rows in rows:
        assert skinny_plans.is_skinny(num_rows, weight)
        assert isinstance(skinny_plans.plan(num_rows, weight, gated=gated), skinny_plans.StreamPlan)
    for num_rows in (rows[0] - 1, rows[1] + 1):
        streamed = isinstance(
            skinny_plans.plan(num_rows, weight, gated=gated), skinny_plans.StreamPlan
        )
        assert not streamed or not skinny_plans.is_skinny(num_rows, weight)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", [(2048, 1536), (1536, 8960), (6144, 1024), (151936, 1024)])
def test_other_weights_are_not_streamed(shape: tuple[int, int]) -> None:
    for num_rows in range(1, 130):
        plan = skinny_plans.plan(num_rows, weight_of(shape))
        assert not isinstance(plan, skinny_plans.StreamPlan)


@pytest.mark.usefixtures("hopper")
def test_what_the_copy_engine_does_not_take_is_not_streamed() -> None:
    assert not skinny_plans.is_skinny(16, weight_of(QKV, torch.float32))
    values = torch.empty(4096 * 4096 + 8, dtype=torch.float16)
    for offset, expected in ((0, True), (1, False), (8, True)):
        weight = values[offset:][: 4096 * 4096].view(4096, 4096)
        assert skinny_plans.is_skinny(16, weight) is expected
        assert skinny_plans.is_skinny(8, weight)


@pytest.mark.usefixtures("hopper")
def test_splits_have_counters() -> None:
    for lines in range(64 * skinny_plans.MIN_STREAM_TILES, skinny_plans.WIDE, 64):
        plan = skinny_plans.plan(16, weight_of((lines, 4096)))
        assert isinstance(plan, skinny_plans.StreamPlan)
        assert plan.splits == 1 or triton.cdiv(lines, plan.tile_n) <= skinny_plans.PROGRAMS


@pytest.mark.parametrize(
    ("version", "capability", "interprets", "expected"),
    [
        ("3.6.0", (9, 0), False, True),
        ("3.7.1", (9, 0), False, True),
        ("3.5.1", (9, 0), False, False),
        ("3.60.0", (9, 0), False, False),
        ("4.0.0+git1234", (9, 0), False, False),
        ("3.6.0", (8, 9), False, False),
        ("3.6.0", (10, 0), False, False),
        ("3.6.0", (9, 0), True, False),
    ],
)
def test_gluon_is_used_where_it_is_known(
    version: str,
    capability: tuple[int, int],
    interprets: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=interprets))
    monkeypatch.setattr(launch, "triton", SimpleNamespace(__version__=version, knobs=knobs))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    asks = launch.runs_hopper_gluon.__wrapped__
    assert asks(HOPPER) is expected
    assert not asks(torch.device("cpu"))


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is launched within a test, compiled for a GPU that is not there."""
    version = tuple(int(number) for number in triton.__version__.split(".")[:2])
    if version not in launch.GLUON_VERSIONS:
        pytest.skip("no Gluon that is known")
    from mini_infer.kernels.triton.skinny_stream import stream_kernel

    fake_gpu(tmp_path, monkeypatch)
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, **options: Any) -> None:
        kernels.append(run(kernel, *arguments, **(options | {"warmup": True})))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    yield kernels
    stream_kernel.device_caches.clear()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("num_rows", "shape", "gated"),
    [(16, QKV, False), (16, DOWN, False), (64, GATE_UP, True), (64, HEAD, False)],
)
def test_two_programs_fit_a_processor(
    num_rows: int, shape: tuple[int, int], gated: bool, compiled: list[Any]
) -> None:
    plan = skinny_plans.plan(num_rows, weight_of(shape), gated=gated)
    assert isinstance(plan, skinny_plans.StreamPlan)
    from mini_infer.kernels.triton.skinny_stream import stream_product

    lines, size = shape  # they decide what is compiled, so the weights need not be there
    weight = torch.empty(size, dtype=torch.bfloat16).expand(lines, size)
    out = torch.empty(num_rows, lines // (2 if gated else 1), dtype=torch.bfloat16)
    x, count = torch.empty(num_rows, size, dtype=torch.bfloat16), torch.zeros(0)
    stream_product(out, x, weight, None, count, **plan._asdict(), adds=not gated, gated=gated)
    assert compiled[0].metadata.shared <= SHARED_BY_TWO
    assert compiled[0].asm["ptx"].count("griddepcontrol.wait") == 1
