import itertools
from collections.abc import Sequence

import pytest
import torch

from mini_infer.core.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS_PER_BAD_WORD,
    SamplingParams,
)
from mini_infer.modeling.sampler import Sampler
from mini_infer.modeling.sampling_state import SamplingState, Stage
from tests.modeling.sampler_oracle import CPU, admit, run, sample, sample_many

INF = float("inf")


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=None, **options)  # type: ignore[arg-type]


def stages_of(params: SamplingParams, vocab_size: int) -> Stage:
    state = SamplingState(1, vocab_size, CPU)
    state.admit([admit(0, params)])
    return Stage(int(state.stages[0]))


class TestGreedy:
    def test_takes_the_likeliest(self) -> None:
        logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]])
        rows = [admit(0, greedy()), admit(1, greedy())]
        assert sample(logits, rows).token_ids.tolist() == [1, 0]

    @pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-6, 9e-6])
    def test_tiny_temperatures_are_greedy(self, temperature: float) -> None:
        draws = sample_many([1.0, 1.0001, 0.0], SamplingParams(temperature=temperature), 200)
        assert draws.unique().tolist() == [1]

    def test_ignores_truncation_and_seed(self) -> None:
        params = greedy(top_k=1, top_p=0.1, min_p=1.0, seed=4)
        assert stages_of(params, 10) is Stage.NONE

    def test_asks_no_optional_stage(self) -> None:
        assert stages_of(greedy(), 10) is Stage.NONE
        assert stages_of(SamplingParams(), 10) is Stage.RANDOM


class TestSeeds:
    LOGITS = torch.zeros(1, 1000)

    def test_same_seed_and_position_same_token(self) -> None:
        row = admit(0, SamplingParams(), (1, 2, 3), seed=5)
        assert len({sample(self.LOGITS, [row]).token_ids.item() for _ in range(5)}) == 1

    @pytest.mark.parametrize("slot", [1, 7])
    def test_the_slot_does_not_matter(self, slot: int) -> None:
        first = sample(self.LOGITS, [admit(0, SamplingParams(), (1, 2), seed=5)])
        other = sample(self.LOGITS, [admit(slot, SamplingParams(), (1, 2), seed=5)])
        assert torch.equal(first.token_ids, other.token_ids)

    def test_the_text_before_does_not_matter_to_the_noise(self) -> None:
        first = sample(self.LOGITS, [admit(0, SamplingParams(), (1, 2), seed=5)])
        other = sample(self.LOGITS, [admit(0, SamplingParams(), (8, 9), 1, seed=5)])
        assert torch.equal(first.token_ids, other.token_ids)

    def test_seeds_and_positions_give_other_tokens(self) -> None:
        drawn = {
            sample(self.LOGITS, [admit(0, SamplingParams(), (1,) * n, seed=seed)]).token_ids.item()
            for seed, n in itertools.product(range(6), range(1, 6))
        }
        assert len(drawn) >= 27

    @pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1])
    def test_all_64_bit_seeds_work(self, seed: int) -> None:
        token = sample(self.LOGITS, [admit(0, SamplingParams(), seed=seed)]).token_ids.item()
        assert 0 <= token < 1000


PROBS = (0.1, 0.2, 0.3, 0.4)


class TestTruncation:
    def kept(self, probs: Sequence[float], **options: float) -> list[int]:
        draws = sample_many(torch.tensor(probs).log().tolist(), SamplingParams(**options), 3000)
        return draws.unique().tolist()

    def test_regression_13_top_p_keeps_the_smallest_set_that_reaches_the_mass(self) -> None:
        assert self.kept(PROBS, top_p=0.6) == [2, 3]

    @pytest.mark.parametrize(
        ("top_p", "kept"),
        [(1e-9, [3]), (0.39, [3]), (0.41, [2, 3]), (0.71, [1, 2, 3]), (0.91, [0, 1, 2, 3])],
    )
    def test_top_p(self, top_p: float, kept: list[int]) -> None:
        assert self.kept(PROBS, top_p=top_p) == kept

    @pytest.mark.parametrize(
        ("top_k", "kept"), [(1, [3]), (2, [2, 3]), (4, [0, 1, 2, 3]), (99, [0, 1, 2, 3])]
    )
    def test_top_k(self, top_k: int, kept: list[int]) -> None:
        assert self.kept(PROBS, top_k=top_k) == kept

    @pytest.mark.parametrize("off", [0, -1])
    def test_top_k_off(self, off: int) -> None:
        assert stages_of(SamplingParams(top_k=off), 4) is Stage.RANDOM

    @pytest.mark.parametrize(
        ("min_p", "kept"), [(1.0, [3]), (0.74, [2, 3]), (0.49, [1, 2, 3]), (0.1, [0, 1, 2, 3])]
    )
    def test_min_p(self, min_p: float, kept: list[int]) -> None:
        assert self.kept(PROBS, min_p=min_p) == kept

    def test_top_p_counts_in_what_top_k_left(self) -> None:
        # Of 0.3 and 0.4 alone, 0.4 holds 0.571.
        assert self.kept(PROBS, top_k=2, top_p=0.5) == [3]
        assert self.kept(PROBS, top_k=2, top_p=0.6) == [2, 3]

    @pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}])
    def test_ties_go_to_the_lower_ids(self, options: dict[str, float]) -> None:
        assert self.kept((0.25,) * 4, **options) == [0, 1]

    def test_temperature_comes_before_top_p(self) -> None:
        # At temperature 1/2 the probabilities are squared: 16, 9, 4, 1 thirtieths.
        assert self.kept(PROBS, temperature=0.5, top_p=0.52) == [3]
        assert self.kept(PROBS, temperature=0.5, top_p=0.54) == [2, 3]

    @pytest.mark.parametrize(("vocab", "top_p"), [(300, 0.999), (5000, 0.5), (5000, 0.9999)])
    def test_more_candidates_than_guessed(self, vocab: int, top_p: float) -> None:
        """A flat distribution makes top-p look beyond its first guess, up to a whole sort."""
        logits = torch.linspace(0, 0.01, vocab).expand(400, -1)
        state = SamplingState(1, vocab, CPU)
        state.admit([admit(0, SamplingParams(top_p=top_p), seed=2)])
        table = torch.zeros(1, 500, dtype=torch.int32)
        draws = Sampler()(logits, [0] * 400, list(range(1, 401)), table, state).token_ids
        mass = logits[0].double().softmax(0).flip(0).cumsum(0)
        smallest = vocab - int((mass < top_p).sum()) - 1
        assert smallest <= int(draws.min()) <= smallest + 0.05 * vocab


class TestMasks:
    def test_min_tokens_masks_the_stop_tokens(self) -> None:
        logits = torch.tensor([[9.0, 8.0, 1.0, 0.0]])
        params = greedy(min_tokens=2)
        for num_output, expected in enumerate([2, 2, 0, 0]):
            tokens = (3,) * (3 + num_output)
            row = admit(0, params, tokens, 3, stop_token_ids=(0, 1))
            assert sample(logits, [row]).token_ids.item() == expected

    def test_min_tokens_ends_also_beside_bad_words(self) -> None:
        logits = torch.tensor([[9.0, 8.0, 7.0]])
        for num_output, expected in enumerate([2, 0]):
            tokens = (2,) * (1 + num_output)
            words = {"stop_token_ids": (0,), "bad_words_token_ids": ((1,),)}
            row = admit(0, greedy(min_tokens=1), tokens, 1, **words)
            assert sample(logits, [row]).token_ids.item() == expected

    def test_min_tokens_counts_the_output_of_a_resumed_request(self) -> None:
        logits = torch.tensor([[9.0, 1.0]])
        resumed = admit(0, greedy(min_tokens=2), (1, 1, 1, 1), 2, stop_token_ids=(0,))
        assert sample(logits, [resumed]).token_ids.item() == 0

    @pytest.mark.parametrize(
        ("tokens", "words", "expected"),
        [
            ((3,), ((0,),), 1),
            ((3, 2), ((2, 0),), 1),
            ((3,), ((2, 0),), 0),
            ((2, 3), ((2, 0),), 0),
            ((1, 2, 3), ((1, 2, 3, 0),), 1),
            ((1, 2, 2), ((1, 2, 3, 0),), 0),
            ((2, 3), ((1, 2, 3, 0),), 0),
            ((2,), ((2, 0), (2, 1)), 2),
            ((2,), ((0,), (1,), (3,)), 2),
            ((2, 2), ((2, 2, 2, 0), (2, 2, 0)), 1),
            ((2,), ((2, 2, 0),), 0),
        ],
    )
    def test_bad_words(
        self, tokens: tuple[int, ...], words: tuple[tuple[int, ...], ...], expected: int
    ) -> None:
        logits = torch.tensor([[9.0, 8.0, 7.0, 6.0]])
        row = admit(0, greedy(), tokens, 1, bad_words_token_ids=words)
        assert sample(logits, [row]).token_ids.item() == expected

    def test_wider_bans_keep_the_narrower_ones_of_other_slots(self) -> None:
        state = SamplingState(2, 4, CPU)
        one = admit(0, greedy(), (3, 2), 1, bad_words_token_ids=((2, 0),))
        two = admit(1, greedy(), (1, 2, 3), 1, bad_words_token_ids=((1, 2, 3, 0), (1,), (2, 2)))
        state.admit([one])
        state.admit([two])
        logits = torch.tensor([[9.0, 8.0, 7.0, 6.0]]).expand(2, -1)
        assert run(logits, [one, two], state).token_ids.tolist() == [1, 2]

    def test_tables_grow_by_doubling_up_to_the_bounds_of_the_parameters(self) -> None:
        state = SamplingState(4, 1000, CPU)
        widths, depths = set(), set()
        for num_words in range(1, 2 * MAX_BAD_WORDS + 1, 5):
            word = (7,) * (1 + num_words % MAX_TOKENS_PER_BAD_WORD)
            words = tuple((*word[1:], last) for last in range(num_words))
            bias = dict.fromkeys(range(num_words), 1.0)
            state.admit([admit(0, greedy(logit_bias=bias), bad_words_token_ids=words)])
            widths |= {state.ban_ids.shape[1], state.bias_ids.shape[1]}
            depths.add(state.ban_prefixes.shape[2])
        assert widths == {1, 8, 16, 32, 64, 128, 256}
        assert max(depths) == MAX_TOKENS_PER_BAD_WORD
        assert all(depth.bit_count() <= 1 for depth in depths)

    def test_what_the_largest_requests_leave_behind_is_bounded(self) -> None:
        num_slots = 256
        state = SamplingState(num_slots, 32000, CPU)
        params = greedy(
            logit_bias=dict.fromkeys(range(MAX_LOGIT_BIASES), 1.0),
            stop_token_ids=range(MAX_STOP_TOKEN_IDS),
            min_tokens=1,
        )
        words = tuple(
            (*range(MAX_TOKENS_PER_BAD_WORD - 1), last) for last in range(2 * MAX_BAD_WORDS)
        )
        stops = tuple(params.stop_token_ids)
        state.admit([admit(0, params, stop_token_ids=stops, bad_words_token_ids=words)])
        bias = state.bias_ids.nbytes + state.bias_values.nbytes
        bans = state.ban_ids.nbytes + state.ban_until.nbytes + state.ban_prefixes.nbytes
        assert bias <= 3 * 2**20
        assert bans <= 20 * 2**20

    def test_allowed_tokens(self) -> None:
        params = SamplingParams(allowed_token_ids=[1, 4])
        assert sample_many([9.0, 0.0, 9.0, 9.0, 0.0], params, 300).unique().tolist() == [1, 4]

    @pytest.mark.parametrize(("bias", "expected"), [(100, 2), (-100, 0), (0.0, 0)])
    def test_logit_bias(self, bias: float, expected: int) -> None:
        logits = torch.tensor([[30.0, 29.0, -40.0]])
        row = admit(0, greedy(logit_bias={2: bias}))
        assert sample(logits, [row]).token_ids.item() == expected

    def test_a_negative_bias_of_100_bans(self) -> None:
        params = SamplingParams(logit_bias={0: -100})
        assert 0 not in sample_many([5.0, 0.0, 0.0], params, 2000)

    def test_ids_outside_the_vocabulary_are_dropped(self) -> None:
        params = greedy(logit_bias={99: 5, -1: 5}, allowed_token_ids=[1, 99], min_tokens=1)
        row = admit(0, params, stop_token_ids=(77,), bad_words_token_ids=((1, 50), ()))
        assert sample(torch.tensor([[3.0, 1.0]]), [row]).token_ids.item() == 1

    def test_bans_that_leave_nothing_are_lifted(self) -> None:
        params = greedy(allowed_token_ids=[1, 2], min_tokens=3)
        row = admit(0, params, stop_token_ids=(1, 2))
        assert sample(torch.tensor([[9.0, 1.0, 2.0]]), [row]).token_ids.item() == 2


class TestPenalties:
    def pick(
        self, logits: list[float], tokens: tuple[int, ...], num_prompt: int, **o: float
    ) -> int:
        row = admit(0, greedy(**o), tokens, num_prompt)
        return int(sample(torch.tensor([logits]), [row]).token_ids.item())

    def test_repetition_covers_prompt_and_output(self) -> None:
        assert self.pick([3.0, 2.9, 2.0], (0, 1), 1, repetition_penalty=2.0) == 2

    def test_repetition_lowers_negative_logits_too(self) -> None:
        assert self.pick([-1.0, -1.5, -9.0], (0,), 1, repetition_penalty=2.0) == 1

    def test_repetition_counts_once(self) -> None:
        assert self.pick([8.0, 3.9, 0.0], (0, 0, 0), 1, repetition_penalty=2.0) == 0

    @pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
    def test_presence_and_frequency_leave_the_prompt_out(self, name: str) -> None:
        assert self.pick([1.0, 0.0], (0, 0), 2, **{name: 2.0}) == 0
        assert self.pick([1.0, 0.0], (0, 0), 1, **{name: 2.0}) == 1

    def test_presence_counts_once_frequency_each_time(self) -> None:
        tokens = (1, 0, 0, 0)
        assert self.pick([2.0, 1.0], tokens, 1, presence_penalty=0.9) == 0
        assert self.pick([2.0, 1.0], tokens, 1, frequency_penalty=0.4) == 1

    def test_negative_penalties_encourage(self) -> None:
        assert self.pick([1.0, 0.0], (0, 1), 1, presence_penalty=-2.0) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "params", [SamplingParams(logprobs=2), SamplingParams(top_k=2, logprobs=2)]
)
def test_half_precision_logits_are_sampled_in_float32(
    dtype: torch.dtype, params: SamplingParams
) -> None:
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(6)).to(dtype)
    half, full = (sample(x, [admit(0, params, seed=1)]) for x in (logits, logits.float()))
    assert torch.equal(half.token_ids, full.token_ids)
    assert half.logprobs is not None
    assert full.logprobs is not None
    assert torch.equal(half.logprobs.logprobs, full.logprobs.logprobs)


def test_a_slot_may_own_several_rows() -> None:
    """As verification of drafts needs: each row sees only the tokens before its position."""
    logits = torch.tensor([[3.0, 2.0, 1.0]]).expand(3, -1)
    state = SamplingState(1, 3, CPU)
    state.admit([admit(0, greedy(presence_penalty=2.0), (2,), 1)])
    table = torch.tensor([[2, 0, 1, 0]])
    result = Sampler()(logits, [0, 0, 0], [1, 2, 3], table, state)
    assert result.token_ids.tolist() == [0, 1, 0]
