"""A rank's view of a checkpoint: of each tensor, the part that the rank has."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_infer.modeling.weights import WeightSource


@dataclass(frozen=True, slots=True)
class Cut:
    """Runs of a tensor's rows (``dim`` 0) or columns (1), one after the other."""

    dim: int = 0
    runs: tuple[range, ...] | None = None
    """None: all there are."""
    size: int | None = None
    """Of what comes out, which zeros fill up; None: as many as the runs have."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of what comes out."""
        if self.runs is None:
            return whole
        count = sum(map(len, self.runs)) if self.size is None else self.size
        return (*whole[: self.dim], count, *whole[self.dim + 1 :])


WHOLE = Cut()


class ShardedSource(WeightSource):
    """The tensors of ``source``, each cut as ``cut`` says; those that it cuts to None are left out.

    What is not here is not read, but for quantised columns and random weights: of these, whole
    tensors are made, one at a time.
    """

    def __init__(self, source: WeightSource, cut: Callable[[str], Cut | None]) -> None:
        cuts = ((name, cut(name)) for name in source.names())
        self._source = source
        self._cuts = {name: cut for name, cut in cuts if cut is not None}

    def names(self) -> Iterable[str]:
        return self._cuts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._cuts[name].shape(tuple(self._source.shape(name)))

    def get(self, name: str) -> Tensor:
        cut = self._cuts[name]
        if cut.runs is None:
            return self._source.get(name)
        parts = self._parts(name, cut.dim, cut.runs)
        like = parts[0] if parts else torch.empty(0)
        return _fill(like.new_empty(self.shape(name)), cut.dim, parts)

    def load_into(
        self, places: dict[str, Tensor], rows: Mapping[str, range] | None = None
    ) -> Iterator[str]:
        """See ``WeightSource.load_into``. Whole tensors and single runs of rows are one piece of a
        file, which can be streamed to a device; so they come first."""
        assert rows is None, "what is cut already is not cut again"
        rows = {}
        pieces: dict[str, Tensor] = {}
        for name in list(places):
            cut = self._cuts[name]
            if cut.runs is not None:
                if cut.dim or len(cut.runs) > 1 or cut.size not in (None, len(cut.runs[0])):
                    continue
                rows[name] = cut.runs[0]
            pieces[name] = places.pop(name)
        yield from self._source.load_into(pieces, rows)
        for name in list(places):
            cut, place = self._cuts[name], places.pop(name)
            assert cut.runs is not None, "whole tensors came first"
            _fill(place, cut.dim, self._parts(name, cut.dim, cut.runs))
            del place
            yield name

    def _parts(self, name: str, dim: int, runs: tuple[range, ...]) -> list[Tensor]:
        return [self._source.get_part(name, dim, run) for run in runs if run]


def _fill(place: Tensor, dim: int, parts: list[Tensor]) -> Tensor:
    """Puts the parts one after the other into ``place``, which it returns; zeros behind them."""
    end = 0
    for part in parts:
        start, end = end, end + part.shape[dim]
        place.narrow(dim, start, end - start).copy_(part)
    place.narrow(dim, end, place.shape[dim] - end).zero_()
    return place
