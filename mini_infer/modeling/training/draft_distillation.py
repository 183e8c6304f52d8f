"""Distils a draft head from what its target would have said along texts.

Each draft of every start is trained towards the target's whole distribution at its place
(knowledge distillation, arXiv 1503.02531; for drafts, DistillSpec, 2310.08461), over the tokens
that the head can draft.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.proposers.head import DraftHead
from mini_infer.modeling.training.target_pass import TargetTexts
from mini_infer.modeling.training.unrolled import head_logits, unroll

DEPTH_DECAY = 0.8
"""What a draft counts beside the one before it: it is looked at only if that one was right."""
LOGITS_AT_ONCE = {"cpu": 2**25, "cuda": 2**27}
"""Bounds the memory of logits: a vocabulary is large, and so is a batch of texts."""


class Distillation:
    """The loss of a head's drafts, and how many of them the target would accept."""

    def __init__(self, model: CausalLM, head: DraftHead, depth: int) -> None:
        self._model, self._head, self._depth = model, head, depth
        # The target's rows of the tokens that can be drafted, in the dtype that it computes in.
        self._rows = model.lm_head.weight.detach()[head.token_ids]

    def backward(self, texts: TargetTexts) -> Tensor:
        """Adds the gradients of a batch to the head's; returns the mean loss of each draft
        ``[depth]``, before their weights.

        Logits of a few places at a time are made, and gone again: gradients are collected at the
        residual streams, and pass through the head's blocks once.
        """
        states = self._unroll(texts)
        leaves = [state.detach().requires_grad_() for state in states]
        losses = torch.zeros(self._depth, device=texts.token_ids.device)
        num_places = int(texts.wanted[:, 1:].sum())
        for batch, place in self._places(texts):
            with torch.no_grad():
                goal = self._target_logits(texts.hidden[batch, place]).float().softmax(-1)
            loss = goal.new_zeros(())
            for ahead, leaf in enumerate(leaves):
                there, start = place > ahead, (place - 1 - ahead).clamp_min(0)
                logits = head_logits(self._head, leaf[batch, start])
                each = cross_entropy(logits.float(), goal, reduction="none")
                each = (each * there).sum() / num_places
                losses[ahead] += each.detach()
                loss = loss + DEPTH_DECAY**ahead * each
            torch.autograd.backward(loss)
        torch.autograd.backward(states, [leaf.grad for leaf in leaves])
        return losses

    @torch.no_grad()
    def matches(self, texts: TargetTexts) -> Tensor:
        """``[B, L, depth]`` bool, by start: is this draft, and each before it, the token that the
        target finds likeliest? A start at p is False where the token behind it is not wanted."""
        num_texts, length = texts.token_ids.shape
        found = torch.zeros(
            num_texts, length, self._depth, dtype=torch.bool, device=texts.wanted.device
        )
        states = self._unroll(texts)
        for batch, place in self._places(texts):
            best = self._model.compute_logits(texts.hidden[batch, place]).argmax(-1)
            for ahead, state in enumerate(states):
                start = place - 1 - ahead
                there = start >= 0
                rows, starts = batch[there], start[there]
                logits = head_logits(self._head, state[rows, starts])
                drafted = self._head.token_ids[logits.argmax(-1)]
                found[rows, starts + 1, ahead] = drafted == best[there]
        found = found.int().cumprod(-1).bool()
        found[:, :-1] &= texts.wanted[:, 1:, None]
        return found

    def _unroll(self, texts: TargetTexts) -> list[Tensor]:
        return unroll(self._model, self._head, texts, self._depth)

    def _places(self, texts: TargetTexts) -> Iterator[tuple[Tensor, Tensor]]:
        """Texts and places whose next token is wanted, a few at a time."""
        batch, place = texts.wanted[:, 1:].nonzero(as_tuple=True)
        at_once = max(1, LOGITS_AT_ONCE[batch.device.type] // len(self._head.token_ids))
        yield from zip(torch.split(batch, at_once), torch.split(place, at_once), strict=True)

    def _target_logits(self, x: Tensor) -> Tensor:
        """``x [N, hidden]`` -> ``[N, Vd]``, of the tokens that can be drafted."""
        return torch.nn.functional.linear(self._model.norm(x), self._rows)


def accepted_lengths(matches: Sequence[Tensor], num_drafts: int) -> tuple[int, int]:
    """Steps and accepted drafts of decoding along texts, ``matches [L, depth]`` of each.

    A step that accepts n drafts goes on 1 + n tokens, so that starts after a rejection count as
    often as they do in use.
    """
    steps = accepted = 0
    for text in matches:
        lengths = text[:, :num_drafts].sum(-1).tolist()
        start, end = 0, len(lengths)
        while start < end:
            steps += 1
            accepted += lengths[start]
            start += 1 + lengths[start]
    return steps, accepted
