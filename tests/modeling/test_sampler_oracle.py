"""Random mixed batches: equal to the per-row oracle, and each row what it would be alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_infer.core.batch import Admission
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.modeling import sampler as sampler_module
from mini_infer.modeling.sampling_state import SamplingState
from tests.modeling.sampler_oracle import CPU, acceptable, admit, run, sample

VOCAB = 23
token_ids = st.integers(0, VOCAB - 1)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    def maybe(values: st.SearchStrategy, off: object) -> object:
        return draw(values) if draw(st.booleans()) else off

    allowed = maybe(st.lists(token_ids, min_size=1, max_size=8, unique=True), None)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 1e-6, 0.3, 1.0, 1.7])),
        top_k=maybe(st.integers(1, VOCAB + 3), 0),
        top_p=maybe(st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99]), 1.0),
        min_p=maybe(st.sampled_from([0.01, 0.2, 1.0]), 0.0),
        repetition_penalty=maybe(st.sampled_from([0.5, 1.3, 2.0]), 1.0),
        presence_penalty=maybe(st.sampled_from([-2.0, 0.7]), 0.0),
        frequency_penalty=maybe(st.sampled_from([-0.5, 1.1]), 0.0),
        logit_bias=maybe(st.dictionaries(token_ids, st.sampled_from([-100, -1.5, 2.0, 100])), {}),
        allowed_token_ids=allowed,
        min_tokens=draw(st.integers(0, 4)),
        max_tokens=None,
        logprobs=maybe(st.integers(0, 5), None),
    )


@st.composite
def admissions(draw: st.DrawFn, max_rows: int = 6) -> list[Admission]:
    rows = []
    for slot in range(draw(st.integers(1, max_rows))):
        tokens = draw(st.lists(token_ids, min_size=1, max_size=9))
        rows.append(
            admit(
                slot,
                draw(sampling_params()),
                tokens,
                draw(st.integers(1, len(tokens))),
                seed=draw(st.integers(-(2**63), 2**64 - 1)),
                stop_token_ids=tuple(draw(st.lists(token_ids, max_size=3))),
                bad_words_token_ids=tuple(
                    tuple(word)
                    for word in draw(
                        st.lists(st.lists(token_ids, min_size=1, max_size=3), max_size=3)
                    )
                ),
            )
        )
    return rows


@st.composite
def logit_rows(draw: st.DrawFn, num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(num_rows, VOCAB, generator=generator) * 3
    # Whole numbers make ties, on which top-k and top-p have to agree too.
    return logits.round() if draw(st.booleans()) else logits


@settings(max_examples=150, deadline=None)
@given(data=st.data(), rows=admissions())
def test_equals_the_per_row_oracle(data: st.DataObject, rows: list[Admission]) -> None:
    logits = data.draw(logit_rows(len(rows)))
    before = logits.clone()
    sampled = sample(logits, rows).token_ids.tolist()
    assert torch.equal(logits, before)
    for row, admission in enumerate(rows):
        assert sampled[row] in acceptable(logits[row].double().tolist(), admission)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), rows=admissions())
def test_a_row_is_the_same_alone_and_in_any_order(
    data: st.DataObject, rows: list[Admission]
) -> None:
    logits = data.draw(logit_rows(len(rows)))
    order = data.draw(st.permutations(range(len(rows))))
    state = SamplingState(len(rows), VOCAB, CPU)
    for admission in rows:
        state.admit([admission])
    alone = [run(logits[i : i + 1], [rows[i]], state) for i in order]
    together = run(logits[order], [rows[i] for i in order], state)
    assert together.token_ids.tolist() == [result.token_ids.item() for result in alone]
    for place, (i, result) in enumerate(zip(order, alone, strict=True)):
        num_top = rows[i].params.logprobs
        if num_top is not None:
            mixed, single = together.logprobs, result.logprobs
            assert mixed.logprobs[place] == single.logprobs[0]
            assert mixed.ranks[place] == single.ranks[0]
            assert mixed.top_token_ids[place, :num_top].tolist() == single.top_token_ids[0].tolist()
            assert torch.equal(mixed.top_logprobs[place, :num_top], single.top_logprobs[0])


@settings(max_examples=50, deadline=None)
@given(data=st.data(), tenants=admissions(1), last=admissions(1))
def test_a_recycled_slot_is_as_good_as_new(
    data: st.DataObject, tenants: list[Admission], last: list[Admission]
) -> None:
    logits = data.draw(logit_rows(1))
    used = SamplingState(1, VOCAB, CPU)
    for tenant in [*tenants, *last]:
        used.admit([tenant])
    fresh = sample(logits, last)
    again = run(logits, last, used)
    assert torch.equal(again.token_ids, fresh.token_ids)
    assert (again.logprobs is None) == (fresh.logprobs is None)


def test_a_recycled_slot_keeps_no_column_of_a_demanding_tenant() -> None:
    demanding = SamplingParams(
        temperature=1.5,
        top_k=3,
        top_p=0.4,
        min_p=0.3,
        repetition_penalty=2.0,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        logit_bias={4: 100, 5: -100},
        allowed_token_ids=[4, 5],
        min_tokens=9,
        logprobs=3,
    )
    used, fresh = SamplingState(2, VOCAB, CPU), SamplingState(2, VOCAB, CPU)
    used.admit([admit(0, demanding, stop_token_ids=(7,), bad_words_token_ids=((1, 2), (3,)))])
    plain = admit(0, SamplingParams(temperature=0), (1, 2), seed=5)
    used.admit([plain])
    fresh.admit([plain])
    for name in ("reals", "integers", "stages", "top_k", "num_logprobs", "bans_until"):
        assert (getattr(used, name)[0] == getattr(fresh, name)[0]).all(), name


@pytest.mark.parametrize("cached_logits", [1, VOCAB, 3 * VOCAB])
@settings(max_examples=15, deadline=None)
@given(data=st.data(), rows=admissions())
def test_blocks_of_rows_change_nothing(
    cached_logits: int, data: st.DataObject, rows: list[Admission]
) -> None:
    logits = data.draw(logit_rows(len(rows)))
    whole = sample(logits, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "CACHED_LOGITS", cached_logits)
        parts = sample(logits, rows)
    assert torch.equal(parts.token_ids, whole.token_ids)
    assert (parts.logprobs is None) == (whole.logprobs is None)
    if whole.logprobs is not None and parts.logprobs is not None:
        assert torch.equal(parts.logprobs.top_token_ids, whole.logprobs.top_token_ids)
        assert torch.equal(parts.logprobs.logprobs, whole.logprobs.logprobs)


SEEDED = admit(0, SamplingParams(seed=42, max_tokens=None), (1, 2), 1, seed=42)
NEIGHBOURS = {
    "unseeded": admit(1, SamplingParams(), (3,), seed=777),
    "top_k_1": admit(1, SamplingParams(top_k=1, seed=99), (3,), seed=99),
    "penalised": admit(1, SamplingParams(repetition_penalty=2.0), (3, 4), 1, seed=8),
    "greedy": admit(1, SamplingParams(temperature=0.0), (3,)),
    "masked": admit(1, SamplingParams(allowed_token_ids=[0]), (3,)),
    "biased": admit(1, SamplingParams(logit_bias={2: 100}), (3,)),
    "min_p": admit(1, SamplingParams(min_p=0.9), (3,)),
    "top_p": admit(1, SamplingParams(top_p=0.1), (3,)),
}


@pytest.mark.parametrize("neighbour", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())
@pytest.mark.parametrize("first", [True, False])
def test_regression_10_a_neighbour_changes_nothing(neighbour: Admission, first: bool) -> None:
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(3))
    alone = sample(logits[:1], [SEEDED]).token_ids.item()
    if first:
        pair = sample(logits.flip(0), [neighbour, SEEDED]).token_ids[1].item()
    else:
        pair = sample(logits, [SEEDED, neighbour]).token_ids[0].item()
    assert pair == alone


@pytest.mark.parametrize("swapped", [True, False])
def test_regression_10_repetition_penalty_beside_top_k_1_with_a_seed(swapped: bool) -> None:
    logits = torch.zeros(2, 9)
    logits[:, 3], logits[:, 5] = 3.0, 2.0
    penalised = admit(0, SamplingParams(temperature=0, repetition_penalty=2.0), (3,))
    top = admit(1, SamplingParams(top_k=1, seed=99), (3,), seed=99)
    rows = [top, penalised] if swapped else [penalised, top]
    assert sample(logits, rows).token_ids.tolist() == ([3, 5] if swapped else [5, 3])


def test_regression_10_a_penalty_counts_prompt_tokens_cached_or_not() -> None:
    """The past is read from the token table, which knows nothing of what was computed."""
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    resumed = admit(0, params, (1, 0, 0), 2, block_ids=(4, 5))
    assert sample(logits, [resumed]).token_ids.item() == 2
