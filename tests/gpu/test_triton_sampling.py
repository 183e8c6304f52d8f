"""Sampling on a GPU at the vocabulary of Qwen2.5: against torch, in a graph, without waiting."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.core.sampling_params import SamplingParams
from mini_infer.kernels import ops, sampling
from mini_infer.kernels.triton.noise import divide
from mini_infer.modeling.sampler import Sampler, draw
from mini_infer.modeling.sampling_state import SamplingState
from mini_infer.modeling.token_logprobs import token_logprobs
from tests.modeling.sampler_oracle import admit

DEVICE = torch.device("cuda")
VOCAB = 151_936
POSITION = 9
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(top_k=50),
    "top_p": SamplingParams(temperature=0.6, top_p=0.95),
    "narrow_top_p": SamplingParams(top_p=0.3),
    "min_p": SamplingParams(min_p=0.1),
    "top_k_and_p": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "many": SamplingParams(top_k=30_000, top_p=0.9, min_p=1e-4),
}
BY_DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def state_of(params: list[SamplingParams], vocab_size: int = VOCAB) -> SamplingState:
    state = SamplingState(len(params), vocab_size, DEVICE)
    state.admit([admit(slot, one, seed=77 + 5 * slot) for slot, one in enumerate(params)])
    return state


def random_logits(num_rows: int, dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    """Drawn afresh in every run; the memory that is handed out next holds NaN."""
    logits = (torch.randn(num_rows, VOCAB, device=DEVICE) * spread).to(dtype)
    torch.full((64 << 20,), math.nan, device=DEVICE)
    return logits


def drawn(logits: Tensor, state: SamplingState, position: int = POSITION) -> Tensor:
    slots = torch.arange(len(logits), device=DEVICE)
    return draw(logits, slots, torch.full_like(slots, position), state)


def torch_drawn(logits: Tensor, state: SamplingState) -> Tensor:
    num_rows = len(logits)
    table = torch.zeros(num_rows, 20, dtype=torch.int32, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "runs_kernels", lambda logits: False)
        return Sampler()(logits, range(num_rows), [POSITION] * num_rows, table, state).token_ids


@BY_DTYPE
@pytest.mark.parametrize("spread", [1.0, 6.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("num_rows", [1, 7, 256])
@pytest.mark.parametrize("name", [*SETTINGS, "mixed"])
def test_equals_the_torch_sampler(
    name: str, num_rows: int, spread: float, dtype: torch.dtype
) -> None:
    """Tokens differ only where rounding of a mass, or of noise near a tie, may decide."""
    every = list(SETTINGS.values())
    params = [SETTINGS.get(name, every[row % len(every)]) for row in range(num_rows)]
    state = state_of(params)
    logits = random_logits(num_rows, dtype, spread)
    fast, slow = drawn(logits, state), torch_drawn(logits, state)
    differ = int((fast != slow).sum())
    assert differ == 0 if name == "greedy" else differ <= num_rows // 100 + (num_rows == 1)
    assert_kept(logits, fast, params)


def assert_kept(logits: Tensor, token_ids: Tensor, params: list[SamplingParams]) -> None:
    """Every token belongs to its row's set, computed in float64, up to rounding of the mass."""
    for row, (token_id, one) in enumerate(zip(token_ids.tolist(), params, strict=True)):
        if one.temperature == 0.0:
            continue
        scores = logits[row].float() / torch.tensor(one.temperature, device=DEVICE)
        logit = logits[row, token_id].float()
        ids = torch.arange(VOCAB, device=DEVICE)
        values = logits[row].float()
        before = (values > logit) | ((values == logit) & (ids < token_id))
        rank = int(before.sum())
        assert one.top_k == 0 or rank < one.top_k
        probs = scores.double().softmax(0)
        if one.top_p < 1.0:
            kept = top_k_mass(values, probs, one.top_k) if one.top_k else 1.0
            assert float(probs[before].sum()) < one.top_p * kept * (1 + 1e-5)
        assert float(probs[token_id]) >= one.min_p * float(probs.max()) * (1 - 1e-5)


def top_k_mass(values: Tensor, probs: Tensor, top_k: int) -> float:
    return float(probs[sampling.top_tokens(values[None], top_k)[0]].sum())


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p"])
def test_draws_follow_the_distribution(name: str) -> None:
    """40,000 positions of one request: as far from the target as true draws are."""
    num_rows, size = 40_000, 600
    params = {
        "plain": SamplingParams(),
        "top_k": SamplingParams(top_k=40),
        "top_p": SamplingParams(top_p=0.6),
    }[name]
    state = state_of([params], size)
    row = torch.randn(size, device=DEVICE) * 1.5
    slots = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
    positions = torch.arange(num_rows, device=DEVICE)
    sampled = draw(row.expand(num_rows, -1), slots, positions, state)
    ids, kept, _ = sampling.truncate(
        row[None],
        torch.tensor([params.top_k], device=DEVICE),
        torch.tensor([params.top_p if params.top_p < 1 else math.inf], device=DEVICE).double(),
        size,
    )
    target = torch.zeros(size, dtype=torch.float64, device=DEVICE)
    target[ids[0]] = kept[0].double().softmax(0)
    found = torch.bincount(sampled, minlength=size).double() / num_rows
    distance = float((found - target).abs().sum() / 2)
    expected = float((2 * target * (1 - target) / (math.pi * num_rows)).sqrt().sum() / 2)
    assert found[target == 0].sum() == 0
    assert 0.5 * expected < distance < 1.5 * expected


@pytest.mark.parametrize("fill", [0.0, -math.inf, math.inf, math.nan])
def test_constant_rows(fill: float) -> None:
    params = list(SETTINGS.values())
    logits = torch.full((len(params), VOCAB), fill, device=DEVICE, dtype=torch.bfloat16)
    token_ids = drawn(logits, state_of(params))
    if fill == 0.0:
        assert torch.equal(token_ids, torch_drawn(logits, state_of(params)))
    else:
        assert token_ids.tolist() == [0] * len(params)


def test_one_graph_serves_every_mix_of_rows() -> None:
    """What rows ask for, their slots and positions all change after the capture."""
    num_rows, every = 32, list(SETTINGS.values())
    state = state_of([SamplingParams(temperature=0.0)] * num_rows)
    logits = random_logits(num_rows, torch.bfloat16)
    slots = torch.arange(num_rows, device=DEVICE)
    num_tokens = torch.zeros_like(slots)
    table = torch.zeros(num_rows + 1, 64, dtype=torch.int32, device=DEVICE)
    draw(logits, slots, num_tokens, state, table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids = draw(logits, slots, num_tokens, state, table)
    for round_ in range(3):
        params = [every[(row + round_) % len(every)] for row in range(num_rows)]
        state.admit([admit(slot, one, seed=round_) for slot, one in enumerate(params)])
        logits.copy_(random_logits(num_rows, torch.bfloat16, 1.0 + 3 * round_))
        slots.copy_(torch.randperm(num_rows, device=DEVICE))
        num_tokens.copy_(torch.randint(0, 64, (num_rows,), device=DEVICE))
        graph.replay()
        assert torch.equal(token_ids, draw(logits, slots, num_tokens, state))
        assert torch.equal(table[slots, num_tokens].long(), token_ids)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


STAGES = {
    "plain": {},
    "truncated": {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    "bias": {"logit_bias": {5: 3.0, 9: -100.0}},
    "allowed": {"allowed_token_ids": [3, 5, 8]},
    "bans": {"min_tokens": 4},
    "logprobs": {"logprobs": 5},
}
MIXES = [names for size in (1, 2, 7) for names in itertools.combinations(STAGES, size)]


@pytest.mark.parametrize("names", MIXES, ids="+".join)
def test_nothing_waits_for_the_device(names: tuple[str, ...], no_waiting: None) -> None:
    """Admission, edits, draw and log-probabilities, for every pair of stages and for all."""
    state = SamplingState(8, VOCAB, DEVICE)
    logits = torch.zeros(8, VOCAB, device=DEVICE, dtype=torch.bfloat16)
    table = torch.zeros(9, 32, dtype=torch.int32, device=DEVICE)
    extra = {"stop_token_ids": (3,), "bad_words_token_ids": ((1, 2), (7,))}
    admissions = []
    for slot in range(8):
        name = names[slot % len(names)]
        params = SamplingParams(temperature=0.7, **STAGES[name])  # type: ignore[arg-type]
        admissions.append(admit(slot, params, (1, 2), 1, slot, **(extra if name == "bans" else {})))
    state.admit(admissions)
    Sampler()(logits, np.arange(8), np.full(8, 2), table, state)


@BY_DTYPE
@pytest.mark.parametrize("num_top", [0, 5, 40])
def test_log_probabilities(num_top: int, dtype: torch.dtype) -> None:
    logits = random_logits(70, dtype, 3.0)
    token_ids = torch.randint(0, VOCAB, (70,), device=DEVICE)
    result = token_logprobs(logits, token_ids, num_top)
    exact = logits.double().log_softmax(-1)
    rows = torch.arange(70, device=DEVICE)
    chosen = exact[rows, token_ids]
    torch.testing.assert_close(result.logprobs.double(), chosen, atol=2e-5, rtol=0)
    values = logits.float()
    ranks = (values > values[rows, token_ids][:, None]).sum(-1) + 1
    assert torch.equal(result.ranks, ranks)
    expected = sampling.top_tokens(values, num_top) if num_top else result.top_token_ids
    assert torch.equal(result.top_token_ids, expected)
    torch.testing.assert_close(
        result.top_logprobs.double(), exact.gather(1, expected), atol=2e-5, rtol=0
    )


def test_memory_of_edits_and_log_probabilities_is_bounded() -> None:
    num_rows = 256
    params = SamplingParams(repetition_penalty=1.2, logit_bias={4: 1.0}, top_p=0.9, logprobs=20)
    state = state_of([params] * num_rows)
    logits = random_logits(num_rows, torch.bfloat16)
    table = torch.zeros(num_rows + 1, 64, dtype=torch.int32, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    Sampler()(logits, range(num_rows), [POSITION] * num_rows, table, state)
    assert torch.cuda.max_memory_allocated() - before < 300e6


@triton.jit
def division_kernel(x_ptr, out_ptr, divisor, size: tl.constexpr):
    lanes = tl.program_id(0) * size + tl.arange(0, size)
    reciprocal = tl.div_rn(1.0, divisor)
    tl.store(out_ptr + lanes, divide(tl.load(x_ptr + lanes), divisor, reciprocal))


@pytest.mark.parametrize("temperature", [0.6, 0.7, 1.0, 1e-5, 1.3, 50.0])
def test_rounding_of_the_division(temperature: float) -> None:
    """Scores should tie where torch's do, so the kernel's division rounds to nearest."""
    x = torch.randn(1 << 20, device=DEVICE) * 20
    x[:4] = torch.tensor([math.inf, -math.inf, 0.0, -0.0])
    divisor = torch.tensor(temperature, device=DEVICE)
    out = torch.empty_like(x)
    division_kernel[1 << 10,](x, out, float(divisor), size=1024)
    assert int((out != x / divisor).sum()) <= 8
