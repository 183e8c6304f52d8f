"""What paged attention needs to know about a step: an argument, never a global."""

from dataclasses import dataclass, field

from torch import Tensor

from mini_infer.core.engine_config import AttentionBackend
from mini_infer.kernels.cpu_attention import RowGroup, group_rows


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
    query_lens: tuple[int, ...]
    """Host copies of the rows' lengths."""
    context_lens: tuple[int, ...]
    backend: AttentionBackend = "torch"
    """Which implementation attends on a GPU. On a CPU there is one."""
    _groups: list[RowGroup] = field(default_factory=list, init=False, repr=False)

    def row_groups(self, block_size: int) -> list[RowGroup]:
        """Rows that a CPU attends together; found once a step, shared by its layers."""
        if not self._groups:
            self._groups.extend(
                group_rows(self.query_lens, self.context_lens, self.block_table, block_size)
            )
        return self._groups
