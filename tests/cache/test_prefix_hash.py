"""Block hashes: chained, salted, and hard to forge."""

import itertools
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.cache.prefix_hash import extend_block_hashes, root_hash


def hashes_of(token_ids: list[int], block_size: int = 4, salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, block_size, salt)
    return hashes


def test_only_full_blocks_are_hashed() -> None:
    assert [len(hashes_of(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_stands_for_its_whole_prefix() -> None:
    one = hashes_of([1, 2, 3, 4, 9, 9, 9, 9])
    other = hashes_of([5, 6, 7, 8, 9, 9, 9, 9])
    assert one[1] != other[1]


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 40), st.sampled_from([1, 4])
)
def test_extending_equals_hashing_at_once(tokens: list[int], cut: int, block_size: int) -> None:
    hashes = hashes_of(tokens[:cut], block_size)
    extend_block_hashes(hashes, tokens, block_size, "")
    assert hashes == hashes_of(tokens, block_size)


def test_each_hash_is_its_blocks_after_its_parents() -> None:
    tokens = list(range(100, 114))
    parent = root_hash("salt")
    for start, hash_ in zip(range(0, 12, 4), hashes_of(tokens, salt="salt"), strict=True):
        ids = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + 4])
        parent = blake2b(parent + ids, digest_size=16).digest()
        assert hash_ == parent


@pytest.mark.parametrize("stranger", [-1, 2**32, 2**64])
def test_what_is_no_token_is_refused_and_does_not_become_another(stranger: int) -> None:
    hashes = hashes_of([1, 2, 3, 4])
    before = hashes.copy()
    with pytest.raises(OverflowError):
        extend_block_hashes(hashes, [1, 2, 3, 4, 5, 6, 7, stranger], 4, "")
    assert hashes == before


def test_salts_share_nothing() -> None:
    assert not set(hashes_of(list(range(16)), salt="a")) & set(hashes_of(list(range(16))))


def test_hashes_are_128_bits_and_repeatable() -> None:
    assert all(len(h) == 16 for h in hashes_of(list(range(32))))
    assert hashes_of(list(range(32))) == hashes_of(list(range(32)))


def test_regression_14_blocks_that_collide_under_a_weak_mix_differ() -> None:
    """Pairs chosen to collide when ids are added, xored, or multiplied by a small prime."""
    families = [
        [(1, 2), (2, 1), (0, 3), (3, 0)],
        [(5, 31), (6, 0), (4, 62)],
        [(0, 2**31), (2**31, 0), (2**16, 2**16), (0, 2**32 - 1), (2**32 - 1, 0)],
        [(1, 0), (0, 1), (257, 0), (0, 257)],
    ]
    for family in families:
        assert len({hashes_of(list(pair), 2)[0] for pair in family}) == len(family)


def test_regression_14_all_pairs_of_small_ids_differ() -> None:
    pairs = list(itertools.product(range(64), repeat=2))
    assert len({hashes_of(list(pair), 2)[0] for pair in pairs}) == len(pairs)


@pytest.mark.parametrize(("one", "other"), [("ab", "a"), ("a\x00", "a"), ("", " ")])
def test_similar_salts_have_different_roots(one: str, other: str) -> None:
    assert root_hash(one) != root_hash(other)


def test_the_block_boundary_is_part_of_the_hash() -> None:
    assert hashes_of([1, 2, 3, 4], 2)[1] != hashes_of([1, 2, 3, 4], 4)[0]
