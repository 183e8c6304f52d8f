"""Content hashes of full blocks, chained so that a block's hash stands for its whole prefix."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def root_hash(cache_salt: str) -> bytes:
    """The parent of a first block. Different salts share nothing: tenants can't probe each other's
    prompts by timing."""
    return blake2b(cache_salt.encode(), digest_size=HASH_BYTES, person=b"mini-infer root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """128-bit BLAKE2b over the parent's hash and the block's token ids.

    Cryptographic on purpose: with a weak mix, a user could craft a prompt that collides with
    another's and be served the other's KV.
    """
    return _chain(parent, _token_bytes(token_ids))


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, cache_salt: str
) -> None:
    """Appends the hashes of the blocks of ``token_ids`` that are full and not hashed yet."""
    first, last = len(hashes), len(token_ids) // block_size
    if first == last:
        return
    parent = hashes[-1] if hashes else root_hash(cache_salt)
    data = memoryview(_token_bytes(token_ids[first * block_size : last * block_size]))
    size = len(data) // (last - first)
    for start in range(0, len(data), size):
        parent = _chain(parent, data[start : start + size])
        hashes.append(parent)


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()


def _chain(parent: bytes, data: bytes | memoryview) -> bytes:
    return blake2b(parent + data, digest_size=HASH_BYTES).digest()
