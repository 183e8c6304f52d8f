"""Pipeline parallelism: which layers of a model a stage has. All of its rules are here.

After GPipe (arXiv 1811.06965): consecutive layers form a stage, a stage has a device of its own (or
several, with tensor parallelism), and what passes from one to the next is the residual stream.

======================  ==========================================================================
embedding               the first stage; a tied one, the last as well
layers                  a run of them, chosen so that the slowest stage takes as short as it can
norm, head, sampler     the last stage
======================  ==========================================================================
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from mini_infer.core.errors import InvalidConfigError

_LAYERS = "model.layers."


@dataclass(frozen=True)
class Stage:
    """Stage ``index`` of ``count``, and the layers that it has."""

    index: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def has(self, name: str, tied: bool) -> bool:
        """Is this tensor of a checkpoint here? Where the table is ``tied``, it is the head, too."""
        if name.startswith(_LAYERS):
            number = name.removeprefix(_LAYERS).partition(".")[0]
            return not number.isdigit() or int(number) in self.layers
        if name == "model.embed_tokens.weight":
            return self.has_table(tied)
        return self.is_last

    def has_table(self, tied: bool) -> bool:
        """Is the table of embeddings here?"""
        return self.is_first or (tied and self.is_last)


def whole(num_layers: int) -> Stage:
    """The only stage: all layers."""
    return Stage(0, 1, range(num_layers))


class Elsewhere(nn.Module):
    """Stands for a module that another stage has."""


def share_out(costs: Sequence[float], end: float, count: int) -> list[range]:
    """Runs of layers for ``count`` stages: the dearest of them is as cheap as it can be, as all
    others wait for it; of several such ways one is taken whose other stages differ little.

    Args:
        costs: of each layer, all of one unit.
        end: of what the last stage does behind its layers.

    Raises:
        InvalidConfigError: there are fewer layers than stages.
    """
    num_layers = len(costs)
    if count > num_layers:
        raise InvalidConfigError(
            f"pipeline_parallel_size {count} is more than the model's {num_layers} layers: lower it"
        )
    sums = [0.0, *accumulate(costs)]
    # best[j]: of the stages so far over the first j layers: the dearest, the squares' sum, ends.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(count):
        is_last = stage == count - 1
        best = {
            j: min(
                (max(dearest, cost), squares + cost * cost, (*ends, j))
                for i, (dearest, squares, ends) in best.items()
                if i < j
                for cost in [sums[j] - sums[i] + (end if is_last else 0.0)]
            )
            for j in ([num_layers] if is_last else range(stage + 1, num_layers - count + stage + 2))
        }
    ends = best[num_layers][2]
    return [range(start, stop) for start, stop in pairwise(ends)]
