"""The sampler on logits and batches of any kind: an id always, and never a question to a device."""

import numpy as np
import pytest
import torch

from mini_infer.core.sampling_params import SamplingParams
from mini_infer.modeling.sampler import EDITED_LOGITS, LOGITS_PER_PAST_TOKEN, Sampler
from mini_infer.modeling.sampling_state import SamplingState, Stage
from tests.modeling.sampler_oracle import admit, sample, sample_many

INF = float("inf")
EXTREMES = {
    "all_minus_infinity": [-INF] * 5,
    "all_nan": [float("nan")] * 5,
    "one_nan": [0.0, float("nan"), 1.0, 2.0, 3.0],
    "negative_nan": [0.0, -float("nan"), 1.0, 2.0, 3.0],
    "infinities": [INF, -INF, INF, 0.0, -INF],
    "largest": [3.4e38, -3.4e38, 3.4e38, 0.0, 1.0],
    "smallest": [1e-45, -1e-45, 0.0, -0.0, 1e-45],
    "one_finite": [-INF, -INF, 0.0, -INF, -INF],
}
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=3),
    "plain": SamplingParams(logprobs=3),
    "cold": SamplingParams(temperature=1e-5),
    "hot": SamplingParams(temperature=1e30),
    "top_k": SamplingParams(top_k=2),
    "top_p": SamplingParams(top_p=0.5),
    "min_p": SamplingParams(min_p=0.5),
    "all": SamplingParams(top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2.0, min_tokens=1),
    "allowed": SamplingParams(allowed_token_ids=[3], presence_penalty=1.0),
}


@pytest.mark.parametrize("logits", EXTREMES.values(), ids=EXTREMES.keys())
@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS.keys())
def test_extreme_logits_give_an_id_in_range(logits: list[float], params: SamplingParams) -> None:
    row = admit(0, params, (0, 1), 1, stop_token_ids=(2,))
    assert 0 <= int(sample(torch.tensor([logits]), [row]).token_ids.item()) < 5


@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_broken_row_leaves_its_neighbour_alone(params: SamplingParams) -> None:
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(4))
    sound = admit(0, params, (1,), seed=3)
    alone = sample(logits[:1], [sound]).token_ids.item()
    logits[1] = float("nan")
    assert sample(logits, [sound, admit(1, params, (1,))]).token_ids[0].item() == alone


@pytest.mark.parametrize("name", ["greedy", "plain", "top_k", "top_p", "min_p", "all"])
def test_a_single_finite_logit_is_always_taken(name: str) -> None:
    assert sample_many(EXTREMES["one_finite"], SETTINGS[name], 500).unique().tolist() == [2]


NEVER_WAITS = {
    "greedy": SamplingParams(temperature=0.0),
    "logprobs": SamplingParams(logprobs=3),
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(top_k=3),
    "top_p": SamplingParams(top_p=0.5),
    "min_p": SamplingParams(min_p=0.1),
    "edits": SamplingParams(
        repetition_penalty=2.0, logit_bias={1: 1.0}, allowed_token_ids=[1, 2], min_tokens=3
    ),
}


@pytest.mark.parametrize("names", [*((name,) for name in NEVER_WAITS), tuple(NEVER_WAITS)])
def test_an_accelerator_is_never_asked(names: tuple[str, ...]) -> None:
    """The meta device holds no values, so reading one on the host raises."""
    meta = torch.device("meta")
    state = SamplingState(len(names), 600, meta)
    for slot, name in enumerate(names):
        extra = {"stop_token_ids": (3,), "bad_words_token_ids": ((1, 2),)}
        state.admit([admit(slot, NEVER_WAITS[name], (1, 2), 1, **extra)])
    rows = list(range(len(names)))
    logits = torch.empty(len(names), 600, device=meta)
    table = torch.empty(len(names), 9, dtype=torch.int32, device=meta)
    result = Sampler()(logits, rows, [2] * len(names), table, state)
    assert result.token_ids.shape == (len(names),)
    assert result.token_ids.device == meta


class TestRowsTogether:
    """On an accelerator; ``meta`` stands for one."""

    LOGITS = torch.empty(300, 2**17, device="meta")

    def rows(self, stages: Stage, longest: int) -> int:
        num_tokens = np.array([1] * 299 + [longest])
        return Sampler()._rows_at_once(self.LOGITS, np.array([0] * 299 + [int(stages)]), num_tokens)

    def test_what_edits_no_logits_is_drawn_at_once(self) -> None:
        assert self.rows(Stage.RANDOM | Stage.LOGPROBS, 10**6) == 300

    def test_edits_copy_logits(self) -> None:
        assert self.rows(Stage.BIAS, 10**6) == EDITED_LOGITS // 2**17

    @pytest.mark.parametrize("longest", [1, 2**10, 2**17, 2**25])
    def test_penalties_copy_a_rows_past_too(self, longest: int) -> None:
        count = self.rows(Stage.PENALTIES, longest)
        width = 2**17 + LOGITS_PER_PAST_TOKEN * longest
        assert count == 1 or count * width <= EDITED_LOGITS < (count + 1) * width
