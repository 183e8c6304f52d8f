"""What each slot's request asked of sampling, as columns that are written once, at admission.

A step gathers the rows of the slots it samples. Beside the device's columns stand a few on the
host: they tell which optional stages a batch needs without asking the device.
"""

import math
from collections.abc import Sequence
from copy import copy
from enum import IntFlag

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mini_infer.core.batch import Admission
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.kernels.sampling import INTEGERS, REALS, splitmix64, token_hashes
from mini_infer.modeling.upload import to_device

GREEDY_TEMPERATURE = 1e-5
"""Below it, dividing logits by the temperature could overflow; the draw is the argmax anyway."""

ANY_TOKEN = -1
"""In a ban's prefix: matches whatever stands there."""
FOREVER = 2**31 - 1
NO_LOGPROBS = -1
"""Host mirror of ``logprobs=None``; 0 asks for the sampled token's only."""


Rows = NDArray[np.int64]


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

_BITS = 1 << np.arange(len(Stage), dtype=np.int64)
_OFF = {"temperature": 0.0, "top_p": math.inf, "log_min_p": -math.inf, "repetition": 1.0}
"""Columns of a greedy slot that asks for nothing; all others are 0."""


def _flags(admission: Admission, vocab_size: int) -> tuple[bool, ...]:
    """Which stages a request's parameters ask for, in the order of ``Stage``."""
    params = admission.params
    random = params.temperature >= GREEDY_TEMPERATURE
    top_k, top_p = 0 < params.top_k < vocab_size, params.top_p < 1.0
    return (
        params.has_penalties,
        bool(params.logit_bias),
        params.allowed_token_ids is not None,
        bool(admission.bad_words_token_ids)
        or (params.min_tokens > 0 and bool(admission.stop_token_ids)),
        random,
        random and (top_k or top_p),
        random and top_p and not top_k,
        random and params.min_p > 0.0,
        params.logprobs is not None,
    )


def _reals(params: SamplingParams) -> tuple[float, ...]:
    """A row of ``SamplingState.reals``."""
    return (
        params.temperature if params.temperature >= GREEDY_TEMPERATURE else 0.0,
        params.top_p if params.top_p < 1.0 else math.inf,
        math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


class SamplingState:
    """Per-slot sampling columns on ``device``, and their host mirrors.

    ``reals``, ``integers`` and ``token_hashes`` keep their addresses: CUDA graphs read them. One
    more slot than ``num_slots``, the last, is nobody's: greedy, for the surplus rows of graphs.

    Lists of unequal length (biases, bans) are padded with entries that change nothing. Their
    tables have the next power of two of the longest list's length that ever came, so that they
    seldom move, and ``core.sampling_params`` bounds the lists: with 256 slots, whatever requests
    ask for, biases take at most 3 MiB and bans 20 MiB. Ids outside the vocabulary are dropped: such
    a token can neither be sampled nor banned. Rows of slots that did not ask for a list's stage
    hold what an earlier tenant left: they are never read.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.num_slots, self.vocab_size, self.device = num_slots, vocab_size, device
        self.token_hashes = token_hashes(vocab_size, device)  # [V]

        rows = num_slots + 1
        # Integers, then the bits of the reals: an admission is one row of one table.
        self._columns = torch.zeros(
            rows, len(INTEGERS) + len(REALS), dtype=torch.int64, device=device
        )
        self.integers = self._columns[:, : len(INTEGERS)]
        self.reals = self._columns[:, len(INTEGERS) :].view(torch.float64)
        for name, value in _OFF.items():
            self.reals[:, REALS.index(name)] = value

        self.bias_ids = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)
        self.bias_values = torch.zeros(num_slots, 0, device=device)
        # A ban masks token `ban_ids` while fewer than `ban_until` tokens stand and the last ones
        # read, backwards, `ban_prefixes`.
        self.ban_ids = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)
        self.ban_until = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)
        self.ban_prefixes = torch.zeros(num_slots, 0, 0, dtype=torch.int32, device=device)
        # [slots, V] once somebody asks for it: tokens that may be sampled.
        self.allowed = torch.zeros(num_slots, 0, dtype=torch.bool, device=device)

        self.stages = np.zeros(rows, dtype=np.int64)
        self.top_k = np.zeros(rows, dtype=np.int64)
        self.num_logprobs = np.full(rows, NO_LOGPROBS, dtype=np.int64)
        self.bans_until = np.zeros(rows, dtype=np.int64)

    def over(self, token_ids: Tensor) -> "SamplingState":
        """The same requests, for draws from logits of ``token_ids [Vd]`` alone, ascending: a draw's
        result is an index into these, and what it would be if all other logits were -inf.

        For ``draw_drafts`` only: the columns that it reads are shared, whoever is admitted later;
        lists of edits, which move as they grow, stay those of now.
        """
        some = copy(self)
        some.token_hashes = self.token_hashes[token_ids]
        return some

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Takes in a step's admissions, each into a slot of its own.

        A few operations on the device, whatever their number, and none that waits for it.
        """
        if not admissions:
            return
        count = len(admissions)
        slots = np.fromiter((a.slot for a in admissions), np.int64, count)
        columns = np.empty((count, self._columns.shape[1]), dtype=np.int64)
        top_k = np.fromiter((a.params.top_k for a in admissions), np.int64, count)
        top_k[(top_k < 0) | (top_k >= self.vocab_size)] = 0
        integers: dict[str, Sequence[int] | Rows] = {
            "seed": [splitmix64(a.seed) for a in admissions],
            "num_prompt_tokens": [a.num_prompt_tokens for a in admissions],
            "top_k": top_k,
        }
        for index, name in enumerate(INTEGERS):
            columns[:, index] = integers[name]
        reals = np.array([_reals(a.params) for a in admissions], dtype=np.float64)
        columns[:, len(INTEGERS) :] = reals.view(np.int64)
        self._write(self._columns, slots, columns)

        stages = np.array([_flags(a, self.vocab_size) for a in admissions]) @ _BITS
        self.stages[slots] = stages
        self.top_k[slots] = top_k
        self.num_logprobs[slots] = [
            NO_LOGPROBS if a.params.logprobs is None else a.params.logprobs for a in admissions
        ]
        self.bans_until[slots] = 0
        lists = (
            (Stage.BIAS, self._write_bias),
            (Stage.ALLOWED, self._write_allowed),
            (Stage.BANS, self._write_bans),
        )
        for stage, write in lists:
            asking = np.flatnonzero(stages & stage)
            if asking.size:
                write([admissions[int(index)] for index in asking], slots[asking])

    def active_stages(self, slots: Rows, num_tokens: Rows) -> Rows:
        """Stages ``[R]`` of rows before whose token ``num_tokens`` stand: bans may be over."""
        over = num_tokens >= self.bans_until[slots]
        active: Rows = self.stages[slots] & ~(over * int(Stage.BANS))
        return active

    def needs_edits(self, slots: Rows, num_tokens: Rows) -> bool:
        """Does a row need more than ``sampler.draw`` does: edits of its logits, or
        log-probabilities?"""
        active = self.active_stages(slots, num_tokens)
        return bool(np.any(active & int(EDITS | Stage.LOGPROBS)))

    def _write(self, table: Tensor, slots: Rows, values: NDArray[np.int64]) -> None:
        """Sets the slots' rows of ``table`` from a host array of ``[N, ...]``."""
        packed = np.concatenate((slots[:, None], values.reshape(len(slots), -1)), axis=1)
        on_device = to_device(packed, self.device)
        rows = on_device[:, 1:].reshape(values.shape).to(table.dtype)
        table.index_copy_(0, on_device[:, 0], rows)

    def _write_bias(self, admissions: Sequence[Admission], slots: Rows) -> None:
        biases = [
            [(i, v) for i, v in admission.params.logit_bias.items() if self._known(i)]
            for admission in admissions
        ]
        width = max(len(bias) for bias in biases)
        self.bias_ids = _widened(self.bias_ids, (width,), 0)
        self.bias_values = _widened(self.bias_values, (width,), 0.0)
        ids = np.zeros((len(slots), self.bias_ids.shape[1]), dtype=np.int64)
        values = np.zeros_like(ids, dtype=np.float32)
        for row, bias in enumerate(biases):
            if bias:
                ids[row, : len(bias)], values[row, : len(bias)] = zip(*bias, strict=True)
        self._write(self.bias_ids, slots, ids)
        bits = self.bias_values.view(torch.int32)
        self._write(bits, slots, values.view(np.int32).astype(np.int64))

    def _write_allowed(self, admissions: Sequence[Admission], slots: Rows) -> None:
        if not self.allowed.numel():
            self.allowed = self.allowed.new_ones(self.num_slots, self.vocab_size)
        places = [
            admission.slot * self.vocab_size + token_id
            for admission in admissions
            for token_id in admission.params.allowed_token_ids or ()
            if self._known(token_id)
        ]
        self.allowed.index_fill_(0, to_device(slots, self.device), False)
        on_device = to_device(np.array(places, dtype=np.int64), self.device)
        self.allowed.view(-1).index_fill_(0, on_device, True)

    def _write_bans(self, admissions: Sequence[Admission], slots: Rows) -> None:
        bans = [self._bans(admission) for admission in admissions]
        width = max(len(row) for row in bans)
        depth = max((len(prefix) for row in bans for _, _, prefix in row), default=0)
        self.ban_ids = _widened(self.ban_ids, (width,), 0)
        self.ban_until = _widened(self.ban_until, (width,), 0)
        self.ban_prefixes = _widened(self.ban_prefixes, (width, depth), ANY_TOKEN)
        ids = np.zeros((len(slots), self.ban_ids.shape[1]), dtype=np.int64)
        until = np.zeros_like(ids)
        prefixes = np.full((len(slots), *self.ban_prefixes.shape[1:]), ANY_TOKEN, dtype=np.int64)
        for row, entries in enumerate(bans):
            for column, (token_id, end, prefix) in enumerate(entries):
                ids[row, column], until[row, column] = token_id, end
                prefixes[row, column, : len(prefix)] = prefix
        self.bans_until[slots] = until.max(axis=1, initial=0)
        self._write(self.ban_ids, slots, ids)
        self._write(self.ban_until, slots, until)
        self._write(self.ban_prefixes, slots, prefixes)

    def _bans(self, admission: Admission) -> list[tuple[int, int, tuple[int, ...]]]:
        """Tokens, how many tokens lift each ban, and the tokens before them (last first)."""
        params = admission.params
        min_length = admission.num_prompt_tokens + params.min_tokens
        stops = admission.stop_token_ids if params.min_tokens > 0 else ()
        words = [word for word in admission.bad_words_token_ids if word and self._known(word[-1])]
        bans: list[tuple[int, int, tuple[int, ...]]] = [
            (token_id, min_length, ()) for token_id in stops if self._known(token_id)
        ]
        return bans + [(word[-1], FOREVER, word[-2::-1] if len(word) > 1 else ()) for word in words]

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
