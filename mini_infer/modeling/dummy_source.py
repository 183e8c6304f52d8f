"""Seeded random weights: every architecture runs from its config.json alone."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling.weights import WeightSource, checkpoint_shapes

NORM_SPREAD = 0.1
BIAS_SPREAD = 0.02


class DummySource(WeightSource):
    """Makes one tensor at a time, in the target dtype; equal seeds and names give equal values.

    A matrix's spread is ``1 / sqrt(inputs)`` (arXiv 1502.01852's argument for linear layers), so
    that activations neither vanish nor grow over the layers and logits spread about 1; norms are
    near 1. Values that look like a model's matter: zeros would make every token equally likely.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """``device`` is where the numbers are drawn; another kind of device draws others.

        Raises:
            UnsupportedModelError: the architecture is not implemented.
        """
        self._shapes = checkpoint_shapes(config)
        self._seed = seed
        self._dtype = dtype
        self._device = torch.device(device)

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def get(self, name: str) -> Tensor:
        tensor = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        return self._draw(name, tensor)

    def load_into(
        self, places: dict[str, Tensor], rows: Mapping[str, range] | None = None
    ) -> Iterator[str]:
        """Draws where the numbers shall stand: the same ones as ``get``, without a copy. Some rows
        of a tensor are copied from all of it, for a generator can't skip what comes before."""
        for name in list(places):
            place = places.pop(name)
            if rows and name in rows:
                place.copy_(self.get_part(name, 0, rows[name]))
            else:
                self._draw(name, place)
            del place
            yield name

    def _draw(self, name: str, tensor: Tensor) -> Tensor:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self._device)
        generator.manual_seed(int.from_bytes(digest, "little", signed=True))
        mean, spread = _distribution(name, self._shapes[name])
        return tensor.normal_(mean, spread, generator=generator)


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if len(shape) > 1:
        return 0.0, 1.0 / math.sqrt(shape[-1])
    return (1.0, NORM_SPREAD) if "norm" in name else (0.0, BIAS_SPREAD)
