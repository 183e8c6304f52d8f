"""Content hashes of full blocks, chained so that a block's hash stands for its whole prefix."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16
_EMPTY = blake2b(digest_size=HASH_BYTES)


def root_hash(cache_salt: str) -> bytes:
    """The parent of a first block. Different salts share nothing: tenants can't probe each other's
    prompts by timing."""
    return blake2b(cache_salt.encode(), digest_size=HASH_BYTES, person=b"mini-infer root").digest()


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, cache_salt: str
) -> None:
    """Appends the hashes of the blocks of ``token_ids`` that are full and not hashed yet: 128-bit
    BLAKE2b over the parent's hash and the block's ids.

    Cryptographic on purpose: with a weak mix, a user could craft a prompt that collides with
    another's and be served the other's KV. Four bytes an id, which is a row of a vocabulary; one
    that needs more raises and never wraps around.

    A first token waits for this over its whole prompt: the ids are packed once, and a copy of an
    empty hasher costs less than a new one.
    """
    first, last = len(hashes), len(token_ids) // block_size
    if first == last:
        return
    parent = hashes[-1] if hashes else root_hash(cache_salt)
    data = array("I", token_ids[first * block_size : last * block_size]).tobytes()
    size = len(data) // (last - first)
    new_hasher = _EMPTY.copy
    for start in range(0, len(data), size):
        hasher = new_hasher()
        hasher.update(parent + data[start : start + size])
        parent = hasher.digest()
        hashes.append(parent)
