"""Small-batch products on a GPU at the sizes of Qwen2.5-7B, Qwen3-0.6B and SmolLM2-135M."""

import math

import pytest
import torch
from torch import Tensor

from mini_infer.kernels import reference
from mini_infer.kernels.triton import skinny

DEVICE = torch.device("cuda")
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
EPS = 1e-6
BY_DTYPE = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
BY_ROWS = pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 13, 32])


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    """Drawn afresh in every run; the memory that is handed out next holds NaN."""
    values = torch.randn(*shape, device=DEVICE, dtype=dtype)
    torch.full((16 << 20,), math.nan, device=DEVICE)
    return values


def assert_near(out: Tensor, exact: Tensor) -> None:
    assert (out.double() - exact).norm() / exact.norm() < TOLERANCE[out.dtype]


@BY_DTYPE
@BY_ROWS
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("num_outputs", "size"), [(4608, 3584), (151936, 1024), (77, 3072), (960, 576)]
)
def test_linear(
    num_outputs: int, size: int, with_norm: bool, num_rows: int, dtype: torch.dtype
) -> None:
    weight, bias = random(num_outputs, size, dtype=dtype), random(num_outputs, dtype=dtype)
    x, scale = random(num_rows, size, dtype=dtype), random(size, dtype=dtype)
    out = skinny.linear(x, weight, bias, (scale, EPS) if with_norm else None)
    norm = (scale.double(), EPS) if with_norm else None
    assert_near(out, reference.linear(x.double(), weight.double(), bias.double(), norm))


@BY_DTYPE
@BY_ROWS
@pytest.mark.parametrize(
    ("num_outputs", "size"),
    [(3584, 3584), (3584, 18944), (1024, 2048), (1024, 3072), (576, 576), (576, 1536)],
)
def test_add_linear(num_outputs: int, size: int, num_rows: int, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, size, dtype=dtype), random(num_outputs, size, dtype=dtype)
    residual = random(num_rows, num_outputs, dtype=dtype)
    exact = reference.add_linear_(residual.double(), x.double(), weight.double())
    assert_near(skinny.add_linear_(residual, x, weight), exact)


@BY_DTYPE
@BY_ROWS
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("num_outputs", "size"), [(18944, 3584), (3072, 1024), (1536, 576)])
def test_gated_linear(
    num_outputs: int, size: int, with_norm: bool, num_rows: int, dtype: torch.dtype
) -> None:
    x, weight = random(num_rows, size, dtype=dtype), random(2 * num_outputs, size, dtype=dtype)
    scale = random(size, dtype=dtype)
    out = skinny.gated_linear(x, weight, norm=(scale, EPS) if with_norm else None)
    norm = (scale.double(), EPS) if with_norm else None
    assert_near(out, reference.gated_linear(x.double(), weight.double(), norm=norm))


@BY_ROWS
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 3072), (576, 1536)])
def test_kernels_that_start_early_wait_for_what_they_read(
    hidden: int, inner: int, num_rows: int
) -> None:
    """A graph of layers, each of which reads what the one before writes, again and again."""
    dtype, layers = torch.bfloat16, 24
    expand = [random(2 * inner, hidden, dtype=dtype) * 0.03 for _ in range(layers)]
    shrink = [random(hidden, inner, dtype=dtype) * 0.02 for _ in range(layers)]
    start, scale = random(num_rows, hidden, dtype=dtype), random(hidden, dtype=dtype)
    residual = torch.empty_like(start)

    def step() -> None:
        residual.copy_(start)
        for up, down in zip(expand, shrink, strict=True):
            skinny.add_linear_(residual, skinny.gated_linear(residual, up, norm=(scale, EPS)), down)

    step()
    eager = residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(50):
        residual.fill_(math.nan)
        graph.replay()
        assert torch.equal(residual, eager)
    exact = start.double()
    for up, down in zip(expand, shrink, strict=True):
        gate_up = reference.linear(exact, up.double(), norm=(scale.double(), EPS))
        exact = exact + reference.linear(reference.silu_and_mul(gate_up), down.double())
    assert (eager.double() - exact).norm() / exact.norm() < 3e-2


@pytest.mark.parametrize("num_rows", [9, 16, 24, 32])
def test_products_of_a_7b_model_with_their_plans(num_rows: int) -> None:
    dtype = torch.bfloat16
    x = random(num_rows, 3584, dtype=dtype)
    weight = random(2 * 18944, 3584, dtype=dtype)
    exact = reference.gated_linear(x.double(), weight.double())
    assert_near(skinny.gated_linear(x, weight), exact)
    assert_near(skinny.linear(x, weight), reference.linear(x.double(), weight.double()))
