"""Where a model's ranks add up what they have, and the norms that come out of it.

Letters in shapes: T tokens of the step.
"""

from collections.abc import Callable

from torch import Tensor, nn

from mini_infer.kernels import ops
from mini_infer.kernels.reference import Norm
from mini_infer.modeling.layers import RMSNorm
from mini_infer.parallel.group import TensorParallelGroup
from mini_infer.parallel.symmetric_memory import Mailboxes


class NormAfterSum(RMSNorm):
    """A norm of what ranks have just added up: where one kernel adds up, it makes the norm, too."""

    def __init__(self, norm: RMSNorm) -> None:
        """Takes over the weight of ``norm``."""
        nn.Module.__init__(self)
        self.weight, self.eps = norm.weight, norm.eps
        self._made: tuple[Tensor, Tensor] | None = None

    def offer(self, x: Tensor, normed: Tensor) -> None:
        """``normed`` is the norm of ``x``, of this very tensor, for whoever asks next."""
        self._made = x, normed

    def before_product(self, x: Tensor) -> tuple[Tensor, Norm | None]:
        """See ``RMSNorm.before_product``."""
        made, self._made = self._made, None
        if made is not None and made[0] is x:
            return made[1], None
        return super().before_product(x)


class RankSum:
    """The end of a module of which each rank computes a part of the result."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self.group = group
        self.norm_after: NormAfterSum | None = None
        """The one that is made of the sum next, if that is known."""

    def __call__(self, part: Tensor) -> Tensor:
        """``part [T, size]`` of all ranks together."""
        boxes = self._boxes_for(part)
        return self.group.all_reduce_(part) if boxes is None else self._in_one(boxes, part, None)

    def add_to(
        self, residual: Tensor, part: Callable[[], Tensor], added: Callable[[], Tensor]
    ) -> Tensor:
        """``residual [T, size]`` and every rank's part, in place or in another tensor.

        ``part`` makes this rank's, ``added`` that with ``residual`` added. Where NCCL adds up, rank
        0's has it: so no rank adds it afterwards.
        """
        boxes = self._boxes_for(residual)
        if boxes is not None:
            return self._in_one(boxes, part(), residual)
        return self.group.all_reduce_(added() if self.group.rank == 0 else part())

    def _boxes_for(self, part: Tensor) -> Mailboxes | None:
        """Those through which a kernel of our own adds up ``part [T, size]``; None where NCCL
        does."""
        boxes = self.group.mailboxes
        return boxes if boxes is not None and boxes.fit(part) else None

    def _in_one(self, boxes: Mailboxes, part: Tensor, residual: Tensor | None) -> Tensor:
        after = self.norm_after
        norm = None if after is None else after.parameters_for(part.dtype)
        places = boxes.addresses, boxes.turns, boxes.rank
        total, normed = ops.sum_over_ranks(part, residual, norm, *places)
        if after is not None and normed is not None:
            after.offer(total, normed)
        return total
