"""Log-probabilities of sampled and of prompt tokens, with the likeliest beside them."""

import pytest
import torch

from mini_infer.core.sampling_params import SamplingParams
from mini_infer.kernels import sampling
from mini_infer.modeling.token_logprobs import token_logprobs
from tests.modeling.sampler_oracle import admit, sample

LOGITS = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)) * 3


def greedy(logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=None, logprobs=logprobs)


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    params = SamplingParams(temperature=0.3, logprobs=4, logit_bias={7: 50}, repetition_penalty=1.5)
    result = sample(LOGITS, [admit(slot, params, (7, 8)) for slot in range(3)])
    expected = LOGITS.log_softmax(-1)
    top = expected.topk(4)
    assert result.logprobs is not None
    assert result.token_ids.tolist() == [7, 7, 7]
    torch.testing.assert_close(result.logprobs.logprobs, expected[:, 7])
    assert torch.equal(result.logprobs.top_token_ids, top.indices)
    torch.testing.assert_close(result.logprobs.top_logprobs, top.values)
    order = expected.argsort(descending=True)
    assert result.logprobs.ranks.tolist() == [row.tolist().index(7) + 1 for row in order]


def test_only_rows_that_ask() -> None:
    rows = [admit(0, greedy()), admit(1, greedy(logprobs=2)), admit(2, greedy(logprobs=0))]
    result = sample(LOGITS, rows).logprobs
    assert result is not None
    assert result.top_token_ids.shape == (3, 2)
    assert result.ranks.tolist() == [0, 1, 1]
    assert sample(LOGITS[:1], rows[:1]).logprobs is None


def test_zero_alternatives_ask_for_the_sampled_token_alone() -> None:
    result = sample(LOGITS[:1], [admit(0, greedy(logprobs=0))]).logprobs
    assert result is not None
    assert result.top_token_ids.shape == (1, 0)
    torch.testing.assert_close(result.logprobs, LOGITS[:1].log_softmax(-1).amax(-1))


def test_zero_alternatives_rank_the_vocabulary_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting keys for the whole vocabulary would cost most of the call."""
    monkeypatch.delattr(sampling, "top_tokens")
    result = token_logprobs(LOGITS, torch.tensor([5, 0, 39]), 0)
    assert result.top_token_ids.shape == result.top_logprobs.shape == (3, 0)
    expected = LOGITS.log_softmax(-1)
    torch.testing.assert_close(result.logprobs, expected[range(3), [5, 0, 39]])
    assert result.ranks.tolist() == ((expected > result.logprobs[:, None]).sum(-1) + 1).tolist()


def test_more_alternatives_than_the_vocabulary() -> None:
    result = sample(torch.tensor([[1.0, 2.0]]), [admit(0, greedy(logprobs=5))]).logprobs
    assert result is not None
    assert result.top_token_ids.tolist() == [[1, 0]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_log_probabilities_of_a_prompt(dtype: torch.dtype) -> None:
    targets = torch.tensor([5, 0, 39], dtype=dtype)
    result = token_logprobs(LOGITS, targets, 3)
    expected = LOGITS.log_softmax(-1)
    torch.testing.assert_close(result.logprobs, expected[range(3), targets.long()])
    assert torch.equal(result.top_token_ids, expected.topk(3).indices)


def test_equal_tokens_share_a_rank_and_list_by_id() -> None:
    result = token_logprobs(torch.zeros(1, 6), torch.tensor([4]), 3)
    assert result.ranks.tolist() == [1]
    assert result.top_token_ids.tolist() == [[0, 1, 2]]
