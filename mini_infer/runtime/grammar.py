"""One choice's place in its grammar: which tokens may come next, and which have come.

A grammar lives where the scheduler is, on the host, beside its ``Request``: a preempted request
keeps its place, and nothing is read again when it is computed anew.
"""

import ctypes
import itertools
import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MAX_THREADS = 8
"""That fill the masks of a step side by side."""


class Grammar:
    """Follows one output, a token at a time. Not thread-safe.

    ``rollback`` takes tokens back, for drafts that a speculative step tried in vain.
    """

    def __init__(self, matcher: "LLMatcher", never: Sequence[int] = ()) -> None:
        """``never`` are tokens of end of sequence that the caller wants ignored."""
        self.matcher = matcher
        self._never = tuple(never)

    def accept(self, token_id: int) -> str | None:
        """Moves on by one token; says why where that is not possible, after which nothing is."""
        # One that failed while its mask was filled would still take an end.
        if not self.matcher.is_error() and self.matcher.consume_token(token_id):
            return None
        return self.matcher.get_error().partition("\n")[0] or "the grammar does not go on"

    @property
    def complete(self) -> bool:
        """True when no further text can follow."""
        return self.matcher.is_stopped()

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last ``num_tokens`` that were accepted."""
        went_back = self.matcher.rollback(num_tokens)
        assert went_back, self.matcher.get_error()

    def fill_after(self, drafts: Sequence[int], address: int, row_bytes: int) -> None:
        """Fills the rows of bits at ``address`` with what may come after each of the drafts. From
        the first that the grammar does not take they are left as they are: it is not accepted."""
        num_taken = 0
        for row, token_id in enumerate(drafts):
            if self.complete or not self.matcher.validate_tokens([token_id]):
                break
            self.matcher.consume_token(token_id)
            num_taken += 1
            if not self.complete:
                self.matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
        if num_taken:
            self.rollback(num_taken)

    def lift_end(self, row: memoryview) -> None:
        """Takes out of a mask what the caller wants ignored, where that leaves any token."""
        if not self._never:
            return
        bits = bytearray(row)
        for token_id in self._never:
            bits[token_id >> 3] &= ~(1 << (token_id & 7))
        if any(bits):
            row[:] = bits


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor(num_threads=max(1, min(MAX_THREADS, (os.cpu_count() or 1) - 1)))


def fill_masks(
    grammars: Sequence[Grammar | None], vocab_size: int, drafts: Sequence[Sequence[int]] = ()
) -> bytearray:
    """Which tokens may come next: a row of bits for each grammar, in one buffer.

    Rows are ``ceil(vocab_size / 32)`` words of 32 bits; token ``t`` is bit ``t % 32`` of word
    ``t // 32``. All are set where there is no grammar any more. Where there are ``drafts``, of each
    grammar some, its row is followed by one for each of them: what may come after it.
    """
    row_bytes = (vocab_size + 31) // 32 * 4
    counts = [1 + len(some) for some in drafts] if drafts else [1] * len(grammars)
    rows = list(itertools.accumulate(counts, initial=0))
    masks = bytearray(b"\xff") * (row_bytes * rows[-1])
    held = [(g.matcher, row) for row, g in zip(rows, grammars, strict=False) if g is not None]
    if not held:
        return masks
    address = ctypes.addressof(ctypes.c_char.from_buffer(masks))
    if len(held) == 1:
        [(matcher, row)] = held
        matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
    else:
        _executor().unsafe_compute_mask_ptr(held, address, row_bytes, rows[-1])
    view = memoryview(masks)
    for index, grammar in enumerate(grammars):
        if grammar is None:
            continue
        row = rows[index]
        if drafts:
            grammar.fill_after(drafts[index], address + (row + 1) * row_bytes, row_bytes)
        for each in range(row, rows[index + 1]):
            grammar.lift_end(view[each * row_bytes : (each + 1) * row_bytes])
    return masks
