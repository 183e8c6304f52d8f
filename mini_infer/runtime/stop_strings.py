"""Finds stop strings in text that arrives in pieces, and holds back what may become one."""

from collections import deque
from collections.abc import Sequence


class _Pattern:
    """Knuth, Morris and Pratt's automaton: ``matched`` is the longest suffix of the text so far
    that is a proper prefix of ``string``."""

    __slots__ = ("_fallback", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        self._fallback = [0]
        """Per prefix, without its last character's index: its longest border. Only of prefixes
        that the text has held: a request may bring megabytes of stop strings, for each choice."""

    def advance(self, char: str) -> bool:
        """Reads one character; does it complete the string?"""
        matched = self.matched
        while matched and self.string[matched] != char:
            matched = self._fallback[matched - 1]
        matched += self.string[matched] == char
        if matched > len(self._fallback):
            self._extend()
        complete = matched == len(self.string)
        self.matched = self._fallback[matched - 1] if complete else matched
        return complete

    def _extend(self) -> None:
        index, border = len(self._fallback), self._fallback[-1]
        while border and self.string[index] != self.string[border]:
            border = self._fallback[border - 1]
        self._fallback.append(border + (self.string[index] == self.string[border]))


class StopStringMatcher:
    """Scans one choice's text for its stop strings.

    The string that is complete first wins, the first of ``stops`` in a tie, however the text was
    cut into pieces. ``append`` returns the text that is safe to show: all but the longest suffix
    that could still become a stop string (with ``include_in_output`` nothing need be held back).
    Time is linear in the text, times the number of stop strings.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._include_in_output = include_in_output
        self._held: deque[str] = deque()
        self._num_held = 0
        self.matched: str | None = None
        """The stop string that ended the text."""

    def append(self, text: str, armed: bool = True) -> str:
        """Text that became safe to show; "" once a stop string was found.

        With ``armed`` False (``min_tokens`` do not stand yet) a stop string that ends in ``text``
        does not count; one that only begins in it does.
        """
        if self.matched is not None or not text:
            return ""
        # Most text begins no stop string: a search for first characters spares its scan.
        active = [item for item in self._patterns if item.matched or item.string[0] in text]
        if not active:
            return text
        self._held.append(text)
        self._num_held += len(text)
        for num_read, char in enumerate(text, start=1):
            complete = [pattern for pattern in active if pattern.advance(char)]
            if complete and armed:
                return self._stop(complete[0].string, surplus=len(text) - num_read)
        if self._include_in_output:
            return self.flush()
        return self._take(self._num_held - max(pattern.matched for pattern in active))

    def flush(self) -> str:
        """The held-back text, when the choice ends for another reason."""
        return self._take(self._num_held)

    def _stop(self, stop: str, surplus: int) -> str:
        self.matched = stop
        cut = 0 if self._include_in_output else len(stop)
        safe = self._take(self._num_held - surplus - cut)
        self._held.clear()
        self._num_held = 0
        return safe

    def _take(self, count: int) -> str:
        """Removes the first ``count`` held characters, without touching the rest again."""
        pieces = []
        self._num_held -= count
        while count > 0:
            piece = self._held.popleft()
            if len(piece) > count:
                self._held.appendleft(piece[count:])
                piece = piece[:count]
            pieces.append(piece)
            count -= len(piece)
        return "".join(pieces)
