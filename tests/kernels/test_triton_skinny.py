"""Small-batch products in Triton against the reference in float64."""

import pytest
import torch
from torch import Tensor

from mini_infer.kernels import reference
from tests.kernels.triton_device import DEVICE

pytest.importorskip("triton")
skinny = pytest.importorskip("mini_infer.kernels.triton.skinny")
plans = pytest.importorskip("mini_infer.kernels.triton.skinny_plans")

DTYPES = [torch.float32, torch.float16]  # the interpreter's products of bfloat16 are wrong
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}
EPS = 1e-5
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
BY_ROWS = pytest.mark.parametrize("num_rows", [1, 2, 3, 6, 9, 20])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_near(out: Tensor, exact: Tensor) -> None:
    assert out.shape == exact.shape
    error = (out.double() - exact).norm() / exact.norm()
    assert error < TOLERANCE[out.dtype]


def double(*values: Tensor | None) -> list[Tensor | None]:
    return [None if value is None else value.double() for value in values]


@BY_DTYPE
@BY_ROWS
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("num_outputs", "size"), [(37, 48), (42, 1040)])
def test_linear(
    num_outputs: int,
    size: int,
    with_norm: bool,
    with_bias: bool,
    num_rows: int,
    dtype: torch.dtype,
) -> None:
    x, weight = random(num_rows, size, dtype=dtype), random(num_outputs, size, dtype=dtype, seed=1)
    bias = random(num_outputs, dtype=dtype, seed=2) if with_bias else None
    scale = random(size, dtype=dtype, seed=3)
    norm = (scale, EPS) if with_norm else None
    out = skinny.linear(x, weight, bias, norm)
    assert out.dtype == dtype
    exact_norm = (scale.double(), EPS) if with_norm else None
    assert_near(out, reference.linear(*double(x, weight, bias), exact_norm))


@BY_DTYPE
@BY_ROWS
@pytest.mark.parametrize("with_bias", [False, True])
def test_add_linear(with_bias: bool, num_rows: int, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, 80, dtype=dtype), random(37, 80, dtype=dtype, seed=1)
    bias = random(37, dtype=dtype, seed=2) if with_bias else None
    residual = random(num_rows, 37, dtype=dtype, seed=3)
    exact = reference.add_linear_(*double(residual, x, weight, bias))
    assert skinny.add_linear_(residual, x, weight, bias) is residual
    assert_near(residual, exact)


@BY_DTYPE
@BY_ROWS
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
def test_gated_linear(with_norm: bool, with_bias: bool, num_rows: int, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, 80, dtype=dtype), random(2 * 37, 80, dtype=dtype, seed=1)
    bias = random(2 * 37, dtype=dtype, seed=2) if with_bias else None
    scale = random(80, dtype=dtype, seed=3)
    out = skinny.gated_linear(x, weight, bias, (scale, EPS) if with_norm else None)
    exact_norm = (scale.double(), EPS) if with_norm else None
    assert_near(out, reference.gated_linear(*double(x, weight, bias), exact_norm))


@BY_DTYPE
@pytest.mark.parametrize("num_rows", [3, 7, 12])
def test_wide_products(num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many lines of weights have plans of their own; here 74 are many."""
    monkeypatch.setattr(plans, "WIDE", 74)
    x, weight = random(num_rows, 272, dtype=dtype), random(2 * 37, 272, dtype=dtype, seed=1)
    assert_near(skinny.gated_linear(x, weight), reference.gated_linear(*double(x, weight)))
    assert_near(skinny.linear(x, weight), reference.linear(*double(x, weight)))


@pytest.mark.parametrize(("num_rows", "size", "splits"), [(6, 3072, 3), (6, 2064, 2), (20, 592, 2)])
def test_splits_leave_their_counters_at_zero(num_rows: int, size: int, splits: int) -> None:
    """The sum of splits is the last arrival's work; a second product finds the counters unused."""
    x, weight = random(num_rows, size), random(64, size, seed=1)
    assert plans.plan(num_rows, weight).splits == splits
    first = skinny.linear(x, weight)
    assert_near(first, reference.linear(*double(x, weight)))
    assert torch.equal(skinny.linear(x, weight), first)
    assert not skinny.arrivals(x.device).any()


@pytest.mark.parametrize(
    ("num_rows", "size", "parts"),
    [
        (2, 128, 1),  # of four whole chunks
        (5, 80, 2),  # a last chunk of half a warp's values
        (9, 272, 2),  # chunks and rows that end within one
        (16, 272, 4),  # the last part has fewer chunks than others
        (20, 48, 1),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_parts_of_lines_in_registers(
    num_rows: int, size: int, parts: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.float16
    monkeypatch.setattr(skinny, "plan", lambda *_: plans.FragmentPlan(parts))
    monkeypatch.setattr(skinny, "FRAGMENT_NORM_DTYPES", {dtype})
    x, weight = random(num_rows, size, dtype=dtype), random(2 * 13, size, dtype=dtype, seed=1)
    bias = random(2 * 13, dtype=dtype, seed=2) if with_bias else None
    norm = random(size, dtype=dtype, seed=3), EPS
    exact_norm = norm[0].double(), EPS
    exact = double(x, weight, bias)
    assert_near(skinny.linear(x, weight, bias, norm), reference.linear(*exact, exact_norm))
    assert_near(skinny.linear(x, weight, bias), reference.linear(*exact))
    assert_near(
        skinny.gated_linear(x, weight, bias, norm), reference.gated_linear(*exact, exact_norm)
    )
    residual = random(num_rows, 2 * 13, dtype=dtype, seed=4)
    exact_sum = reference.add_linear_(residual.double(), *exact)
    assert_near(skinny.add_linear_(residual, x, weight, bias), exact_sum)


def test_no_product_with_the_weight_of_a_norm_leaves_the_range_of_float16() -> None:
    x = random(3, 64, dtype=torch.float16) * 3000
    weight = random(11, 64, dtype=torch.float16, seed=1)
    scale = random(64, dtype=torch.float16, seed=2) * 30
    exact = reference.linear(*double(x, weight), norm=(scale.double(), EPS))
    assert_near(skinny.linear(x, weight, norm=(scale, EPS)), exact)


@pytest.mark.parametrize(
    ("num_rows", "shape", "parts"),
    [
        (1, (960, 576), None),  # plain threads
        (2, (960, 576), 1),
        (2, (2048, 1536), None),  # two rows, and more than one warp: plain threads again
        (8, (2048, 1536), 4),
        (16, (2048, 1536), 4),
        (32, (2048, 1536), None),  # too many programs would read too many activations
        (8, (896, 4864), 8),
        (8, (4608, 3584), None),
        (8, (896, 8960), None),  # no eight warps hold it
    ],
)
def test_short_lines_are_held_in_registers(
    num_rows: int, shape: tuple[int, int], parts: int | None
) -> None:
    weight = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    plan = plans.plan(num_rows, weight, norms=shape[1] < 2048)
    assert parts == (plan.parts if isinstance(plan, plans.FragmentPlan) else None)


def test_out_is_written_where_it_is_given() -> None:
    x, weight = random(2, 32), random(5, 32, seed=1)
    out = torch.empty(2, 5, device=DEVICE)
    assert skinny.linear(x, weight, out=out) is out
    assert torch.equal(out, skinny.linear(x, weight))


@pytest.mark.parametrize(
    ("num_rows", "shape", "dtype", "expected"),
    [
        (1, (64, 4096), torch.bfloat16, True),
        (2, (64, 4096), torch.bfloat16, True),
        (8, (64, 4096), torch.bfloat16, True),
        (9, (64, 4096), torch.bfloat16, False),  # the library's start and end weigh little
        (32, (16384, 4096), torch.bfloat16, True),
        (32, (64, 1024), torch.float16, True),
        (33, (64, 1024), torch.float16, False),
        (2, (64, 1024), torch.float32, True),
        (3, (64, 1024), torch.float32, False),
        (0, (64, 1024), torch.bfloat16, False),
        (1, (64, 1025), torch.bfloat16, False),
        (1, (64, 1024), torch.int8, False),
    ],
)
def test_is_skinny(
    num_rows: int, shape: tuple[int, int], dtype: torch.dtype, expected: bool
) -> None:
    assert plans.is_skinny(num_rows, torch.empty(shape, dtype=dtype)) is expected


def test_transposed_weights_are_the_librarys() -> None:
    assert not plans.is_skinny(1, torch.empty(32, 64).t())
