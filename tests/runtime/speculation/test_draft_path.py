"""A host's drafts over what is in flight: where they stand, whether they came, whether more may
follow."""

from typing import cast

from mini_infer.core.request import OutputGrammar
from mini_infer.runtime.speculation.draft_path import DraftPath
from tests.runtime.speculation.simulation import make_request


def sent_path(num_sent: int = 2) -> DraftPath:
    """Of a request of three tokens, one of whose is in flight."""
    return DraftPath(start=3, num_in_flight=1, token_ids=(4, 5, 6, 7), num_sent=num_sent)


def test_drafts_are_judged_where_they_stand() -> None:
    path = sent_path()
    assert (path.first_place, path.drafts) == (4, (5, 6, 7))
    assert path.num_right([1, 2, 3]) == path.num_right([1, 2, 3, 4]) == 0
    assert path.num_right([1, 2, 3, 4, 5]) == 1
    assert path.num_right([1, 2, 3, 99, 5, 6, 8]) == 2  # what was in flight was another token
    assert path.num_right([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 3


def test_drafts_follow_others_that_seem_right() -> None:
    request, sent = make_request([1, 2, 3]), sent_path()
    request.num_in_flight_tokens, request.num_in_flight_drafts = 4, 2
    more = DraftPath(3, 4, (4, 5, 6, 7, 8))
    assert more.fits_behind([sent], request)
    assert not DraftPath(3, 4, (4, 5, 9, 7, 8)).fits_behind([sent], request)
    assert not DraftPath(3, 4, (4, 5)).fits_behind([sent], request)  # it does not know
    request.token_ids.append(99)  # one that was in flight, and is known by now
    request.num_in_flight_tokens = 3
    assert DraftPath(4, 3, (5, 6, 7, 8)).fits_behind([sent], request)
    sent.is_lost = True
    assert not DraftPath(4, 3, (5, 6, 7, 8)).fits_behind([sent], request)


def test_behind_plain_tokens_drafts_always_fit() -> None:
    request = make_request([1, 2, 3])
    request.num_in_flight_tokens = 1
    assert DraftPath(3, 1, (9, 9)).fits_behind([], request)
    assert DraftPath(3, 1, (9, 9)).fits_behind([sent_path()], request)  # it was never launched


def test_masks_are_not_made_for_drafts_behind_drafts() -> None:
    request = make_request([1, 2, 3])
    request.grammar = cast(OutputGrammar, object())
    path = DraftPath(3, 4, (4, 5, 6, 7, 8))
    request.num_in_flight_tokens, request.num_in_flight_drafts = 4, 2
    assert not path.fits_behind([sent_path()], request)
    request.num_in_flight_tokens, request.num_in_flight_drafts = 1, 0
    assert path.fits_behind([], request)
