"""What mixtures of experts share. Their ranks hold whole experts (expert parallelism).

Letters in shapes: T tokens of the step.
"""

from torch import Tensor, nn

from mini_infer.modeling.rank_sums import RankSum


class ExpertSum(nn.Module):
    """The end of a mixture of experts, a child of its module: adds what the experts say, weighted,
    to the residual stream.

    Every rank has all tokens, so nothing is sent to an expert: each rank computes what its own
    routed experts say of the tokens that chose them, and its part of the shared experts, and one
    sum ends both. It is the sum that ends a plain feed-forward network.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sum: RankSum | None = None
        """Set where the experts are spread over ranks."""

    def add_to(self, residual: Tensor, part: Tensor) -> Tensor:
        """``residual [T, hidden]`` and the ``part [T, hidden]`` of every rank; the result may take
        the place of either."""
        if self.sum is None:
            return residual.add_(part)
        return self.sum.add_to(residual, lambda: part, lambda: residual.add_(part))
