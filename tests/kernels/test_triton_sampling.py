"""Sampling in Triton against the sampler in torch: equal logits must give equal tokens."""

import math

import pytest
import torch
from torch import Tensor

from mini_infer.core.batch import Admission
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.kernels import ops
from mini_infer.kernels import sampling as reference
from mini_infer.modeling import sampler as sampler_module
from mini_infer.modeling.sampler import Sampler
from mini_infer.modeling.sampling_state import SamplingState
from mini_infer.modeling.token_logprobs import token_logprobs
from tests.kernels.triton_device import DEVICE
from tests.modeling.sampler_oracle import admit

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("mini_infer.kernels.triton.sampling")
logprobs = pytest.importorskip("mini_infer.kernels.triton.logprobs")
noise = pytest.importorskip("mini_infer.kernels.triton.noise")
tl = triton.language
negative_gumbel, row_keys = noise.negative_gumbel, noise.row_keys

# The interpreter computes both branches of a choice, also the one with infinity minus infinity.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")

INF = float("inf")
VOCAB = 71
POSITION = 5
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, top_k=3),
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "top_k": SamplingParams(top_k=7),
    "top_p": SamplingParams(top_p=0.8),
    "narrow_top_p": SamplingParams(top_p=0.1),
    "min_p": SamplingParams(min_p=0.2),
    "top_k_and_p": SamplingParams(temperature=0.6, top_k=20, top_p=0.7),
    "large_top_k": SamplingParams(top_k=60),
    "all": SamplingParams(temperature=1.7, top_k=40, top_p=0.6, min_p=0.1),
}


@pytest.fixture(autouse=True)
def tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts, tiles and rounds of the search, though the vocabulary is tiny."""
    monkeypatch.setattr(kernels, "SCANNED", 32)
    monkeypatch.setattr(kernels, "FINISHED", 64)
    monkeypatch.setattr(kernels, "MAX_PARTS", 2)
    monkeypatch.setattr(kernels, "LISTED", 4)
    monkeypatch.setattr(kernels, "FEW", 8)
    monkeypatch.setattr(kernels, "SEGMENT", 8)


def admitted(admissions: list[Admission], vocab_size: int = VOCAB) -> SamplingState:
    state = SamplingState(len(admissions), vocab_size, DEVICE)
    state.admit(admissions)
    return state


def rows_of(params: list[SamplingParams], seed: int = 0) -> list[Admission]:
    return [admit(slot, one, seed=seed + slot) for slot, one in enumerate(params)]


def draw(logits: Tensor, state: SamplingState, positions: list[int] | None = None) -> Tensor:
    """One row a slot, in the order of slots."""
    num_rows = len(logits)
    slots = torch.arange(num_rows, device=DEVICE)
    num_tokens = torch.tensor(positions or [POSITION] * num_rows, device=DEVICE)
    return kernels.draw(logits, slots, num_tokens, state.reals, state.integers, state.token_hashes)


def torch_draw(logits: Tensor, state: SamplingState, positions: list[int] | None = None) -> Tensor:
    num_rows = len(logits)
    table = torch.zeros(num_rows, 20, dtype=torch.int32, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "runs_kernels", lambda logits: False)
        num_tokens = positions or [POSITION] * num_rows
        return Sampler()(logits, range(num_rows), num_tokens, table, state).token_ids


def random_logits(num_rows: int, seed: int, rounded: bool, vocab_size: int = VOCAB) -> Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits.round() if rounded else logits).to(DEVICE)


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(("listed", "few", "segment"), [(4, 8, 8), (64, 8, 8), (4, 64, 2)])
def test_mixed_batches_equal_the_torch_sampler(
    listed: int, few: int, segment: int, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "LISTED", listed)
    monkeypatch.setattr(kernels, "FEW", few)
    monkeypatch.setattr(kernels, "SEGMENT", segment)
    params = list(SETTINGS.values())
    state = admitted(rows_of(params, 100))
    logits = random_logits(len(params), listed + few, rounded)
    before = logits.clone()
    assert draw(logits, state).tolist() == torch_draw(logits, state).tolist()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("size", [9, 40, VOCAB])
def test_draws_over_some_tokens_are_draws_where_the_others_are_impossible(size: int) -> None:
    """In both samplers; also where a row keeps more tokens than there are."""
    params = list(SETTINGS.values())
    state = admitted(rows_of(params, 300))
    token_ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(size))[:size]
    token_ids = token_ids.sort().values.to(DEVICE)
    logits = random_logits(len(params), size, True, size)
    spread = logits.new_full((len(params), VOCAB), -INF).index_copy_(1, token_ids, logits)
    expected = torch_draw(spread, state)
    some = state.over(token_ids)
    for drawn in (draw(logits, some), torch_draw(logits, some)):
        assert token_ids[drawn].tolist() == expected.tolist()
    for row, token in enumerate(expected.tolist()):  # where no other row's candidates are looked at
        alone = admitted([admit(0, params[row], seed=300 + row)]).over(token_ids)
        assert token_ids[torch_draw(logits[row : row + 1], alone)].tolist() == [token]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits(dtype: torch.dtype) -> None:
    params = [SETTINGS["plain"], SETTINGS["all"]]
    state = admitted(rows_of(params))
    logits = random_logits(len(params), 3, False).to(dtype)
    assert draw(logits, state).tolist() == torch_draw(logits, state).tolist()


def test_a_row_is_the_same_alone_and_among_others() -> None:
    params = [SETTINGS[name] for name in ("greedy", "plain", "top_k", "top_p")]
    logits = random_logits(len(params), 4, True)
    state = admitted(rows_of(params))
    together = draw(logits, state)
    for row in (1, 3):
        slot = torch.tensor([row], device=DEVICE)
        position = torch.tensor([POSITION], device=DEVICE)
        alone = kernels.draw(
            logits[row : row + 1], slot, position, state.reals, state.integers, state.token_hashes
        )
        assert alone.item() == together[row].item()


@pytest.mark.parametrize("value", [0.0, -2.5])
def test_where_all_tokens_tie_the_lowest_ids_are_kept(value: float) -> None:
    params = [
        SamplingParams(top_k=9),
        SamplingParams(top_p=0.25),
        SamplingParams(top_k=40, top_p=0.5),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=0.0),
    ]
    state = admitted(rows_of(params, 7))
    logits = torch.full((len(params), VOCAB), value, device=DEVICE)
    drawn = draw(logits, state)
    assert drawn.tolist() == torch_draw(logits, state).tolist()
    assert drawn[4].item() == 0


def test_ties_at_the_edge_of_the_kept_set() -> None:
    """Nine tokens on top, all others equal: top-k 20 takes the eleven lowest ids of these."""
    params = [SamplingParams(top_k=20), SamplingParams(temperature=4.0, top_p=0.4)] * 3
    state = admitted(rows_of(params, 40))
    logits = torch.zeros(len(params), VOCAB, device=DEVICE)
    logits[:, 50:59] = 1.0
    assert draw(logits, state).tolist() == torch_draw(logits, state).tolist()


NAN = float("nan")
EXTREMES = {
    "all_minus_infinity": ([-INF] * 5, 0),
    "all_nan": ([NAN] * 5, 0),
    "one_nan": ([0.0, NAN, 1.0, 2.0, 3.0], 1),
    "negative_nan": ([0.0, -NAN, 1.0, 2.0, 3.0], 1),
    "nan_beyond_infinity": ([INF, 0.0, NAN, NAN, INF], 2),
    "infinities": ([-INF, -INF, INF, INF, 0.0], 2),
    "one_finite": ([-INF, -INF, 0.0, -INF, -INF], 2),
    "largest": ([-3.4e38, 3.4e38, 3.4e38, 0.0, 1.0], None),
    "smallest": ([1e-45, -1e-45, 0.0, -0.0, 1e-45], None),
}


@pytest.mark.parametrize(("logits", "expected"), EXTREMES.values(), ids=EXTREMES.keys())
def test_extreme_logits(logits: list[float], expected: int | None) -> None:
    params = [
        SETTINGS["greedy"],
        SETTINGS["plain"],
        SamplingParams(temperature=1e-5, top_k=2),
        SamplingParams(temperature=1e30, top_p=0.5),
        SETTINGS["min_p"],
    ]
    state = admitted(rows_of(params), 5)
    drawn = draw(torch.tensor(logits, device=DEVICE).expand(len(params), -1), state)
    assert all(0 <= token_id < 5 for token_id in drawn.tolist())
    if expected is not None:
        assert set(drawn.tolist()) == {expected}


@pytest.mark.parametrize("vocab_size", [1, 2, 33])
def test_any_size_of_vocabulary(vocab_size: int) -> None:
    params = [SETTINGS[name] for name in ("greedy", "plain", "top_p")]
    state = admitted(rows_of(params), vocab_size)
    logits = random_logits(len(params), 5, False, vocab_size)
    assert draw(logits, state).tolist() == torch_draw(logits, state).tolist()


def test_tokens_are_written_to_the_table() -> None:
    """Each at its slot's position; a position behind the table's end is not written."""
    state = admitted(rows_of([SETTINGS["plain"]] * 3))
    table = torch.full((4, 6), -1, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([2, 0, 2, 1], device=DEVICE)
    num_tokens = torch.tensor([3, 5, 4, 6], dtype=torch.int32, device=DEVICE)
    logits = random_logits(4, 6, False)
    token_ids = kernels.draw(
        logits, slots, num_tokens, state.reals, state.integers, state.token_hashes, table
    )
    expected = torch.full_like(table, -1)
    for row, (slot, place) in enumerate([(2, 3), (0, 5), (2, 4)]):
        expected[slot, place] = token_ids[row]
    assert torch.equal(table, expected)


def test_the_surplus_slot_is_greedy() -> None:
    state = admitted(rows_of([SETTINGS["all"]]))
    surplus = torch.tensor([state.num_slots], device=DEVICE)
    logits = random_logits(1, 8, False)
    token_id = kernels.draw(
        logits, surplus, surplus, state.reals, state.integers, state.token_hashes
    )
    assert token_id.item() == logits.argmax().item()


@triton.jit
def noise_kernel(hashes_ptr, seeds_ptr, out_ptr, size: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, size)
    key0, key1 = row_keys(tl.load(seeds_ptr + row), tl.full([], 9, tl.int64))
    hashes = tl.load(hashes_ptr + lanes).to(tl.uint32, bitcast=True)
    values = negative_gumbel(hashes, key0, key1)
    tl.store(out_ptr + row * size + lanes, values)


def test_noise_is_that_of_the_reference() -> None:
    seeds = [reference.splitmix64(seed) for seed in (0, 1, -1, 2**63, 12345)]
    mixed = torch.tensor(seeds, device=DEVICE)
    hashes = reference.token_hashes(8192, DEVICE)
    out = torch.full((len(seeds), 8192), math.nan, device=DEVICE)
    noise_kernel[(len(seeds),)](hashes, mixed, out, size=8192)
    keys = reference.row_keys(mixed, torch.full_like(mixed, 9))
    exact = reference.negative_gumbel(hashes, *keys)
    torch.testing.assert_close(out, exact, atol=2e-6, rtol=2e-7)


@pytest.mark.parametrize(("num_top", "listed"), [(0, 4), (3, 64), (3, 4), (99, 64)])
def test_log_probabilities(num_top: int, listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "TILE", 32)
    monkeypatch.setattr(logprobs, "SEGMENT", 8)
    monkeypatch.setattr(logprobs, "LISTED", listed)
    logits = random_logits(4, 2, True)
    token_ids = torch.tensor([0, 70, 5, 9], device=DEVICE)
    expected = token_logprobs(logits, token_ids, num_top)
    monkeypatch.setattr(ops, "runs_kernels", lambda logits: True)
    result = token_logprobs(logits, token_ids, num_top)
    torch.testing.assert_close(result.logprobs, expected.logprobs)
    torch.testing.assert_close(result.top_logprobs, expected.top_logprobs)
    assert torch.equal(result.ranks, expected.ranks)
    assert torch.equal(result.top_token_ids, expected.top_token_ids)


def test_the_sampler_edits_in_torch_and_runs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [
        SamplingParams(repetition_penalty=2.0, top_k=5, logprobs=2),
        SamplingParams(logit_bias={3: 50}, top_p=0.5),
        SamplingParams(temperature=0.0, allowed_token_ids=[4, 9]),
        SamplingParams(min_tokens=3),
        SamplingParams(temperature=0.0),
    ]
    rows = [
        admit(slot, one, (1, 2), 1, seed=slot, stop_token_ids=(6,))
        for slot, one in enumerate(params)
    ]
    state = admitted(rows)
    logits = random_logits(len(rows), 9, False)
    expected = torch_draw(logits, state)
    monkeypatch.setattr(ops, "runs_kernels", lambda logits: True)
    table = torch.zeros(len(rows), 20, dtype=torch.int32, device=DEVICE)
    result = Sampler()(logits, range(len(rows)), [POSITION] * len(rows), table, state)
    assert result.token_ids.tolist() == expected.tolist()
    assert result.logprobs is not None
    plain = Sampler()(logits[4:], [4], [POSITION], table, state)
    assert plain.token_ids.tolist() == expected[4:].tolist()


def test_every_batch_launches_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pointer that is aligned to 16 bytes or not makes two kernels: a batch must not decide."""
    aligned: list[tuple[bool, ...]] = []

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> "Noted":
            return self

        def __call__(self, logits: Tensor, *arguments: object, **constants: object) -> None:
            tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
            aligned.append(tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors))

    for name in ("scan_kernel", "finish_kernel"):
        monkeypatch.setattr(kernels, name, Noted())
    state = admitted([Admission("a", 0, (1,), 1, SamplingParams(), 0)])
    for num_rows in range(1, 6):
        rows = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
        sampler_module.draw(torch.zeros(num_rows, VOCAB, device=DEVICE), rows, rows, state)
    assert len(set(aligned[::2])) == len(set(aligned[1::2])) == 1
