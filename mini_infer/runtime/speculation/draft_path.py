"""Where a host's proposer says that a request goes, over tokens that are still in flight."""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_infer.core.request import Request


@dataclass(slots=True)
class DraftPath:
    """What a proposer says a request's next tokens are.

    ::

        known tokens      in flight        drafts
        |---------------|-------------|---- num_sent ----|----------|
                      start      first_place
    """

    start: int
    """Known tokens when it did."""
    num_in_flight: int
    """So many of the path's tokens were sampled by steps in flight, if all drafts there are right:
    one each, and those. The others are drafts."""
    token_ids: tuple[int, ...]
    num_sent: int = 0
    """Drafts that a step verifies."""
    is_lost: bool = False
    """They stand behind others that were wrong."""

    @property
    def first_place(self) -> int:
        """Where the first draft is to stand."""
        return self.start + self.num_in_flight

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.token_ids[self.num_in_flight :]

    def num_right(self, token_ids: list[int]) -> int:
        """Drafts that came, up to the first that did not: they may, also where what is in flight
        was foretold wrong."""
        came = token_ids[self.first_place : self.first_place + len(self.drafts)]
        return _num_equal(self.drafts, came)

    def fits_behind(self, sent: Sequence["DraftPath"], request: Request) -> bool:
        """May its drafts stand behind those that were ``sent`` and are in flight, by what is known
        by now? They have to be right, or these stand at other places than the host thinks."""
        if not request.num_in_flight_drafts:
            return True
        if request.grammar is not None or not sent:
            return False  # masks are for the drafts at the places for which they were made
        begin = sent[0].start
        said = (*request.token_ids[begin:], *self.token_ids)
        for path in sent:
            drafts = path.drafts[: path.num_sent]
            if path.is_lost or _num_equal(drafts, said[path.first_place - begin :]) < len(drafts):
                return False
        return True


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens they begin with in common."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(some), len(others)))
