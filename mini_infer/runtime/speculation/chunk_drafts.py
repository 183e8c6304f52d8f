"""The drafts of one chunk."""

from typing import NamedTuple


class ChunkDrafts(NamedTuple):
    """The drafts of one chunk: ``num_drafts`` that it verifies, and those that are proposed behind
    it. ``token_ids`` are the former, where the host proposed them."""

    num_drafts: int = 0
    token_ids: tuple[int, ...] = ()
    num_proposed: int = 0


NO_DRAFTS = ChunkDrafts()
