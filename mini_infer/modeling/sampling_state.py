"""What each slot's request asked of sampling, as columns that are written once, at admission.

A step gathers the rows of the slots it samples. Beside the device's columns stand a few on the
host: they tell which optional stages a batch needs without asking the device.
"""

import math
from enum import IntFlag

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.batch import Admission
from mini_infer.kernels.sampling import splitmix64, token_hashes

GREEDY_TEMPERATURE = 1e-5
"""Below it, dividing logits by the temperature could overflow; the draw is the argmax anyway."""

ANY_TOKEN = -1
"""In a ban's prefix: matches whatever stands there."""
FOREVER = 2**31 - 1
NO_LOGPROBS = -1
"""Host mirror of ``logprobs=None``; 0 asks for the sampled token's only."""


REALS = ("temperature", "top_p", "log_min_p", "repetition", "presence", "frequency")
"""Columns of ``SamplingState.reals``. Off is: infinity for top_p, minus infinity for log_min_p."""
INTEGERS = ("seed", "num_prompt_tokens", "top_k")
"""Columns of ``SamplingState.integers``; the seed is mixed, top_k is 0 when off."""


class Stage(IntFlag):
    """Optional work that a slot asked for. A batch pays only for the stages in its union."""

    NONE = 0
    PENALTIES = 1
    BIAS = 2
    ALLOWED = 4
    BANS = 8
    RANDOM = 16
    """Not greedy."""
    TRUNCATE = 32
    """Random, with top-k or top-p."""
    TOP_P_ALONE = 64
    """Top-p without top-k: nothing bounds the number of candidates beforehand."""
    MIN_P = 128
    LOGPROBS = 256


EDITS = Stage.PENALTIES | Stage.BIAS | Stage.ALLOWED | Stage.BANS


def stages_of(admission: Admission, vocab_size: int) -> Stage:
    """The optional stages that a request's parameters ask for."""
    params = admission.params
    random = params.temperature >= GREEDY_TEMPERATURE
    top_k, top_p = 0 < params.top_k < vocab_size, params.top_p < 1.0
    wanted = {
        Stage.PENALTIES: params.has_penalties,
        Stage.BIAS: bool(params.logit_bias),
        Stage.ALLOWED: params.allowed_token_ids is not None,
        Stage.BANS: bool(admission.bad_words_token_ids)
        or (params.min_tokens > 0 and bool(admission.stop_token_ids)),
        Stage.RANDOM: random,
        Stage.TRUNCATE: random and (top_k or top_p),
        Stage.TOP_P_ALONE: random and top_p and not top_k,
        Stage.MIN_P: random and params.min_p > 0.0,
        Stage.LOGPROBS: params.logprobs is not None,
    }
    stages = Stage.NONE
    for stage, is_wanted in wanted.items():
        if is_wanted:
            stages |= stage
    return stages


class SamplingState:
    """Per-slot sampling columns on ``device``, and their host mirrors.

    Lists of unequal length (biases, bans) are padded with entries that change nothing. Their
    tables have the next power of two of the longest list's length that ever came, so that they
    seldom move, and ``core.sampling_params`` bounds the lists: with 256 slots, whatever requests
    ask for, biases take at most 3 MiB and bans 20 MiB. Ids outside the vocabulary are dropped: such
    a token can neither be sampled nor banned.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.num_slots, self.vocab_size, self.device = num_slots, vocab_size, device
        self.token_hashes = token_hashes(vocab_size, device)  # [V]

        self.reals = torch.zeros(num_slots, len(REALS), dtype=torch.float64, device=device)
        self.integers = torch.zeros(num_slots, len(INTEGERS), dtype=torch.int64, device=device)
        self.bias_ids = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)
        self.bias_values = torch.zeros(num_slots, 0, device=device)
        # A ban masks token `ban_ids` while fewer than `ban_until` tokens stand and the last ones
        # read, backwards, `ban_prefixes`.
        self.ban_ids = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)
        self.ban_until = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)
        self.ban_prefixes = torch.zeros(num_slots, 0, 0, dtype=torch.int32, device=device)
        # [slots, V] once somebody asks for it: tokens that may be sampled.
        self.allowed = torch.zeros(num_slots, 0, dtype=torch.bool, device=device)

        self.stages = np.zeros(num_slots, dtype=np.int64)
        self.top_k = np.zeros(num_slots, dtype=np.int64)
        self.num_logprobs = np.full(num_slots, NO_LOGPROBS, dtype=np.int64)
        self.bans_until = np.zeros(num_slots, dtype=np.int64)

    def admit(self, admission: Admission) -> None:
        """Overwrites every column of the admission's slot: nothing of the last tenant stays."""
        params, slot = admission.params, admission.slot
        stages = stages_of(admission, self.vocab_size)
        self.stages[slot] = stages
        self.top_k[slot] = top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        reals = {
            "temperature": params.temperature,
            "top_p": params.top_p if params.top_p < 1.0 else math.inf,
            "log_min_p": math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
        }
        integers = {
            "seed": splitmix64(admission.seed),
            "num_prompt_tokens": admission.num_prompt_tokens,
            "top_k": top_k,
        }
        self.reals[slot] = torch.tensor([reals[name] for name in REALS], dtype=torch.float64)
        self.integers[slot] = torch.tensor([integers[name] for name in INTEGERS])
        self._write_bias(admission)
        self._write_allowed(admission)
        self._write_bans(admission)

    def _write_bias(self, admission: Admission) -> None:
        slot = admission.slot
        bias = {i: v for i, v in admission.params.logit_bias.items() if self._known(i)}
        self.bias_ids = _widened(self.bias_ids, (len(bias),), 0)
        self.bias_values = _widened(self.bias_values, (len(bias),), 0.0)
        self.bias_ids[slot] = 0
        self.bias_values[slot] = 0.0
        self.bias_ids[slot, : len(bias)] = torch.tensor(list(bias), dtype=torch.int64)
        self.bias_values[slot, : len(bias)] = torch.tensor(list(bias.values()), dtype=torch.float32)

    def _write_allowed(self, admission: Admission) -> None:
        allowed = admission.params.allowed_token_ids
        if allowed is not None:
            if not self.allowed.numel():
                self.allowed = self.allowed.new_ones(self.num_slots, self.vocab_size)
            ids = [token_id for token_id in allowed if self._known(token_id)]
            self.allowed[admission.slot] = False
            self.allowed[admission.slot, torch.tensor(ids, dtype=torch.int64)] = True
        else:
            self.allowed[admission.slot] = True

    def _write_bans(self, admission: Admission) -> None:
        slot, params = admission.slot, admission.params
        min_length = admission.num_prompt_tokens + params.min_tokens
        stops = admission.stop_token_ids if params.min_tokens > 0 else ()
        words = [word for word in admission.bad_words_token_ids if word and self._known(word[-1])]
        bans: list[tuple[int, int, tuple[int, ...]]] = [
            (token_id, min_length, ()) for token_id in stops if self._known(token_id)
        ]
        bans += [(word[-1], FOREVER, word[-2::-1] if len(word) > 1 else ()) for word in words]
        self.bans_until[slot] = max((until for _, until, _ in bans), default=0)

        width, depth = len(bans), max((len(prefix) for _, _, prefix in bans), default=0)
        self.ban_ids = _widened(self.ban_ids, (width,), 0)
        self.ban_until = _widened(self.ban_until, (width,), 0)
        self.ban_prefixes = _widened(self.ban_prefixes, (width, depth), ANY_TOKEN)
        self.ban_ids[slot] = 0
        self.ban_until[slot] = 0
        self.ban_prefixes[slot] = ANY_TOKEN
        if bans:
            self.ban_ids[slot, :width] = torch.tensor([token_id for token_id, _, _ in bans])
            self.ban_until[slot, :width] = torch.tensor([until for _, until, _ in bans])
            padded = [prefix + (ANY_TOKEN,) * (depth - len(prefix)) for _, _, prefix in bans]
            self.ban_prefixes[slot, :width, :depth] = torch.tensor(padded, dtype=torch.int32)

    def _known(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size


def _widened(table: Tensor, sizes: tuple[int, ...], fill: float) -> Tensor:
    """``table [slots, ...]`` with its inner sizes grown to powers of two that hold ``sizes``."""
    if all(have >= need for have, need in zip(table.shape[1:], sizes, strict=True)):
        return table
    shape = [
        max(have, 1 << (need - 1).bit_length() if need else 0)
        for have, need in zip(table.shape[1:], sizes, strict=True)
    ]
    wide = table.new_full((table.shape[0], *shape), fill)
    wide[tuple(slice(0, size) for size in table.shape)] = table
    return wide
