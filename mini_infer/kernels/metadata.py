"""What a step's kernels need to know beside the tensors: arguments, never globals."""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
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
    pieces: dict[Hashable, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )
    """How kernels on a GPU cut the contexts; found by a step's first layer, for all of them."""

    def last_tokens(self) -> Tensor:
        """``[R]``: which of the step's tokens is each row's last."""
        return self.cu_seqlens_q[1:] - 1

    def row_groups(self, block_size: int) -> list[RowGroup]:
        """Rows that a CPU attends together; found once a step, shared by its layers."""
        if not self._groups:
            self._groups.extend(
                group_rows(self.query_lens, self.context_lens, self.block_table, block_size)
            )
        return self._groups


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of a step (arXiv 2104.09864): where each token stands, and all angles.

    ``table [max_len, D]`` float32 holds per position D / 2 cosines, then D / 2 sines; ``positions
    [T]`` int64. Kernels on a GPU look their rows up themselves.
    """

    table: Tensor
    positions: Tensor
    _rows: dict[torch.dtype, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )

    def cos_sin(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``cos, sin``, each ``[T, 1, D]``: gathered once a step, used by every layer.

        The first half of ``sin`` is negated: a head is rotated as
        ``x * cos + swap_halves(x) * sin``.
        """
        if dtype not in self._rows:
            rows = torch.nn.functional.embedding(self.positions, self.table).to(dtype)
            cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
            self._rows[dtype] = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return self._rows[dtype]
