"""What paged attention needs to know about a step: an argument, never a global."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """R requests (rows) with T new tokens in all; row r's queries end at its last token.

    Shapes: ``cu_seqlens_q [R + 1]``, ``seqlens_k [R]`` (context including this step's tokens),
    ``block_table [R, B]`` and ``slot_mapping [T]`` (block id * block size + offset), all integers
    on the model's device.
    """

    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seqlen_k: int
    query_lens: tuple[int, ...] = ()
    """Host copies of the row lengths, for backends that loop over rows."""
    context_lens: tuple[int, ...] = ()
