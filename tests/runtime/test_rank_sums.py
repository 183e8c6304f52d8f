"""Sums of few rows that come with their norm: the tokens are one process's, and products take the
rows that are normed already. What two GPUs do in a kernel, threads do with the reference here."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.kernels import ops, reference
from mini_infer.modeling import layers
from mini_infer.modeling.layers import RMSNorm
from mini_infer.modeling.rank_sums import NormAfterSum
from tests.runtime.engine_tools import generate, greedy
from tests.runtime.fake_executor import TINY_MODEL
from tests.runtime.rank_threads import ThreadGroup, sharded_engine
from tests.runtime.tiny_model import tiny_engine

FEW_ROWS = 3
STEP_ROWS = 8
PROMPTS = [[5, 6, 7, 8, 9], [7, 8], [9] * 7]
EARLY_EXIT = SpeculativeConfig(
    method="early_exit", num_speculative_tokens=2, num_layers=1, on_device=True
)


class Boxes:
    """In place of ``Mailboxes``: ``addresses`` are the group that exchanges."""

    turns = None

    def __init__(self, group: ThreadGroup) -> None:
        self.addresses, self.rank = group, group.rank

    def fit(self, part: Tensor) -> bool:
        return len(part) <= FEW_ROWS


def summed(
    part: Tensor,
    residual: Tensor | None,
    norm: reference.Norm | None,
    group: ThreadGroup,
    turns: None,
    rank: int,
) -> tuple[Tensor, Tensor | None]:
    parts = group._meeting.exchange(rank, part.clone())
    return reference.sum_of_parts(torch.stack(parts), residual, norm)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of norms before products, those that a sum has made and those that it has not."""
    counts: Counter[str] = Counter()
    before_product = NormAfterSum.before_product

    def counted(norm: NormAfterSum, x: Tensor) -> tuple[Tensor, Any]:
        result = before_product(norm, x)
        made = result[1] is None
        counts["made" if made else "left" if len(x) <= FEW_ROWS else "many rows"] += 1
        if made:
            assert torch.equal(result[0], reference.rms_norm(x, norm.weight, norm.eps))
        return result

    def open_mailboxes(group: ThreadGroup, size: int, dtype: torch.dtype, step_rows: int) -> None:
        assert (size, dtype, step_rows) == (TINY_MODEL.hidden_size, torch.float32, STEP_ROWS)
        group.mailboxes = Boxes(group)  # type: ignore[assignment]

    monkeypatch.setattr(layers, "has_blocked_products", lambda: False)  # as on a GPU
    monkeypatch.setattr(ops, "gpu_kernels", lambda: layers)
    monkeypatch.setattr(ops, "sum_over_ranks", summed)
    monkeypatch.setattr(ThreadGroup, "open_mailboxes", open_mailboxes)
    monkeypatch.setattr(NormAfterSum, "before_product", counted)
    return counts


def tokens(engine: Any) -> list[list[int]]:
    return generate(engine, PROMPTS, greedy(8))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("speculation", [None, EARLY_EXIT], ids=["plain", "early exit"])
def test_tokens_are_those_of_one_process(
    counts: Counter[str], architecture: str, speculation: SpeculativeConfig | None
) -> None:
    options: dict[str, Any] = {"model_config": replace(TINY_MODEL, architecture=architecture)}
    expected = tokens(tiny_engine(**options))
    engine = sharded_engine(
        tensor_parallel_size=2,
        speculative_config=speculation,
        max_num_batched_tokens=STEP_ROWS,
        **options,
    )
    assert tokens(engine) == expected
    engine.core.executor.assert_same_logits()  # type: ignore[attr-defined]
    assert counts["made"] > 50
    # A head that is asked for rows of its own choice, or after the first layers, norms them itself.
    assert counts["left"] < counts["made"] / 3


def test_switched_off(counts: Counter[str]) -> None:
    engine = sharded_engine(tensor_parallel_size=2, custom_all_reduce=False)
    assert tokens(engine) == tokens(tiny_engine())
    assert counts["made"] == 0


def test_a_norm_is_handed_out_once_and_for_its_rows_only() -> None:
    plain = RMSNorm(4, 1e-6)
    plain.weight.data = torch.ones(4)
    norm, x, normed = NormAfterSum(plain), torch.ones(1, 4), torch.zeros(1, 4)
    norm.offer(x, normed)
    assert norm.before_product(x) == (normed, None)
    assert norm.before_product(x)[1] is not None
    norm.offer(x, normed)
    assert norm.before_product(x.clone())[1] is not None
    assert norm.before_product(x)[1] is not None  # which may have changed since
