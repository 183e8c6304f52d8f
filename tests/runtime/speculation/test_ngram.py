"""Prompt lookup against a search through the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.runtime.speculation.ngram import NGramProposer
from tests.runtime.speculation.simulation import make_request


def proposer(least: int = 2, most: int = 4) -> NGramProposer:
    config = SpeculativeConfig(method="ngram", prompt_lookup_min=least, prompt_lookup_max=most)
    return NGramProposer(config)


def searched(token_ids: list[int], least: int, most: int, num_drafts: int) -> list[int]:
    """The same by brute force: longest run first, then the latest place."""
    end = len(token_ids)
    for length in range(min(most, end - 1), least - 1, -1):
        for place in range(end - length - 1, -1, -1):
            if token_ids[place : place + length] == token_ids[end - length :]:
                text = list(token_ids)
                while len(text) < end + num_drafts:  # a token follows the one a period before it
                    text.append(text[len(text) - end + place + length])
                return text[end:]
    return []


texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(
    prompt=texts,
    pieces=st.lists(texts, max_size=4),
    least=st.integers(1, 3),
    more=st.integers(0, 2),
    num_drafts=st.integers(1, 16),
)
def test_it_finds_what_a_search_finds_however_the_text_grew(
    prompt: list[int], pieces: list[list[int]], least: int, more: int, num_drafts: int
) -> None:
    ours, request = proposer(least, least + more), make_request(prompt)
    for piece in [[], *pieces]:
        request.token_ids += piece
        (drafts,) = ours.propose([request], num_drafts)
        assert drafts == searched(request.token_ids, least, least + more, num_drafts)


def test_the_longest_run_decides_and_of_its_places_the_latest() -> None:
    request = make_request([1, 2, 3, 10, 1, 2, 3, 11, 2, 3, 12, 1, 2, 3])
    assert proposer().propose([request], 1) == [[11]]
    assert proposer(most=2).propose([request], 1) == [[12]]


def test_a_text_that_repeats_is_continued_with_its_period() -> None:
    request = make_request([9, 1, 2, 3, 1, 2, 3, 1, 2])
    assert proposer().propose([request], 7) == [[3, 1, 2, 3, 1, 2, 3]]
    assert proposer().propose([make_request([5, 5, 5])], 3) == [[5, 5, 5]]


def test_nothing_is_proposed_for_what_is_new() -> None:
    requests = [make_request([1]), make_request([1, 2, 3]), make_request([1, 2, 1, 3])]
    assert proposer().propose(requests, 4) == [[], [], []]


def test_each_request_has_its_own_text() -> None:
    first, second = make_request([1, 2, 3, 1, 2]), make_request([1, 2, 4, 1, 2])
    ours = proposer()
    assert ours.propose([first, second], 1) == [[3], [4]]
    assert ours.propose([second], 1) == [[4]]


def test_tokens_are_read_once() -> None:
    class Counting(list[int]):
        num_read = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            read = super().__getitem__(place)
            Counting.num_read += len(read) if isinstance(place, slice) else 1
            return read

    request, ours = make_request(range(1000)), proposer()
    request.token_ids = Counting(request.token_ids)
    ours.propose([request], 4)
    Counting.num_read = 0
    for _ in range(10):
        request.token_ids.append(7)
        ours.propose([request], 4)
    assert Counting.num_read < 10 * 40


def test_nothing_is_kept_of_a_request_that_is_gone() -> None:
    ours, request = proposer(), make_request(range(10))
    ours.propose([request], 4)
    assert len(ours._indexes) == 1
    del request
    assert len(ours._indexes) == 0
