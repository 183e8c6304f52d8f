"""From a checkpoint's tensors to a model's parameters, one tensor at a time.

Parameters are allocated once, uninitialised, in their final dtype; each tensor of the checkpoint is
copied into its place and dropped, and a layer packs its weights as soon as its last one stands. An
operating system counts memory only once it is written, so memory peaks at the model plus one layer.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from mini_infer.core.errors import WeightsError
from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.layers import Layer, PackedLinear
from mini_infer.modeling.registry import model_class
from mini_infer.modeling.stage import Stage, share_out

NAMES_PER_MESSAGE = 8
SAMPLER_COLUMNS = 512
"""What sampling costs, as if the head had so many columns more: it reads a step's logits several
times."""


class WeightSource(Protocol):
    """A checkpoint: tensors by their Hugging Face name."""

    def names(self) -> Iterable[str]:
        """Every tensor, in the order that is cheapest to read."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading its data."""

    def get(self, name: str) -> Tensor:
        """The tensor, in any floating dtype; the caller drops it before it asks for the next.

        Raises:
            WeightsError: the data can't be read.
        """

    def get_part(self, name: str, dim: int, part: range) -> Tensor:
        """Of the tensor, the rows (``dim`` 0) or columns (1) ``part``, which follow each other.

        A source that can reads no others.

        Raises:
            WeightsError: the data can't be read.
        """
        return self.get(name).narrow(dim, part.start, len(part))

    def load_into(
        self, places: dict[str, Tensor], rows: Mapping[str, range] | None = None
    ) -> Iterator[str]:
        """Copies tensors into their places, converted to the places' dtype; of those in ``rows``,
        only these.

        Yields a tensor's name once it is there and its place is gone from ``places``: no view of a
        parameter is left that its layer may drop.

        Raises:
            WeightsError: the data can't be read.
        """
        for name in list(places):
            part = None if rows is None else rows.get(name)
            tensor = self.get(name) if part is None else self.get_part(name, 0, part)
            places.pop(name).copy_(tensor)
            del tensor
            yield name


def build_model(
    config: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
) -> CausalLM:
    """Builds an architecture with the weights of a checkpoint, ready for inference.

    Raises:
        UnsupportedModelError: the architecture is not implemented.
        WeightsError: the checkpoint does not fit it.
    """
    return fill_model(empty_model(config, dtype, device, max_model_len), source)


def fill_model(model: CausalLM, source: WeightSource) -> CausalLM:
    """Loads an empty model's weights, and makes it ready for inference; returns it.

    Raises:
        WeightsError: the checkpoint does not fit it.
    """
    unfinished = _unfinished_layers(model)
    nbytes = {name: place.nbytes for name, place in checkpoint_places(model).items()}
    with tqdm(
        total=sum(nbytes.values()),
        desc="Weights",
        unit="B",
        unit_scale=True,
        disable=None,  # unless a terminal is there to see it
        leave=False,
    ) as bar:
        for name in load_weights(model, source):
            for layer in unfinished:
                layer.missing.discard(name)
            for layer in [layer for layer in unfinished if not layer.missing]:
                layer.module.finish_loading()
                unfinished.remove(layer)
            bar.update(nbytes[name])
    return model


def empty_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    stage: Stage | None = None,
) -> CausalLM:
    """An architecture with uninitialised weights, or what a ``stage`` has of it.

    Raises:
        UnsupportedModelError: the architecture is not implemented.
    """
    with _allocation(dtype, device):
        return model_class(config.architecture)(config, max_model_len, stage).eval()


def load_weights(model: CausalLM, source: WeightSource) -> Iterator[str]:
    """Copies the tensors of ``source`` into ``model``, converted to the parameters' dtype.

    Yields the name of each tensor once it is in place.

    Raises:
        WeightsError: a tensor is missing, surplus or misshapen; the message names it.
    """
    places = checkpoint_places(model)
    names = _checked_names(model, places, source)
    yield from source.load_into({name: places.pop(name) for name in names})


def check_checkpoint(config: ModelConfig, source: WeightSource) -> None:
    """Does ``source`` hold the tensors of a model of ``config``, no more and no less? Reads none.

    Raises:
        WeightsError: a tensor is missing, surplus or misshapen; the message names it.
    """
    model = empty_model(config, torch.float32, "meta", max_model_len=1)
    _checked_names(model, checkpoint_places(model), source)


def _checked_names(model: CausalLM, places: dict[str, Tensor], source: WeightSource) -> list[str]:
    """The names that fill ``places``, in the source's order."""
    names = [name for name in source.names() if not _is_redundant(model, name)]
    _check_names(places, names)
    _check_shapes(places, names, source)
    return names


class HasPackedNames(Protocol):
    """A module that says what a checkpoint calls the parts of its packed projections."""

    packed_names: ClassVar[dict[str, tuple[str, ...]]]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def get_submodule(self, target: str) -> nn.Module: ...


def checkpoint_places(model: HasPackedNames) -> dict[str, Tensor]:
    """Name in a checkpoint -> the view of a parameter that it fills.

    A packed projection appears as its parts: ``q_proj.weight`` is the first rows of ``qkv_proj``.
    """
    return {
        name: view
        for parameter_name, parameter in model.named_parameters()
        for name, view in _parts(model, parameter_name, parameter)
    }


def _parts(
    model: HasPackedNames, name: str, parameter: nn.Parameter
) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint calls a parameter, or each part of a packed one."""
    module_name, _, kind = name.rpartition(".")
    module = model.get_submodule(module_name)
    if isinstance(module, PackedLinear):
        parent, _, packed = module_name.rpartition(".")
        rows = torch.split(parameter.data, list(module.out_features))
        for part, view in zip(model.packed_names[packed], rows, strict=True):
            yield _checkpoint_name(f"{parent}.{part}.{kind}"), view
    else:
        yield _checkpoint_name(name), parameter.data


@dataclass(eq=False, slots=True)
class _UnfinishedLayer:
    """A layer, and the names of its tensors that are still to come."""

    module: Layer
    missing: set[str]


def _unfinished_layers(model: CausalLM) -> list[_UnfinishedLayer]:
    """Every layer, those within another before it."""
    names = {
        id(parameter): {part for part, _ in _parts(model, name, parameter)}
        for name, parameter in model.named_parameters()
    }
    return [
        _UnfinishedLayer(module, set().union(*(names[id(own)] for own in module.parameters())))
        for module in reversed(list(model.modules()))
        if isinstance(module, Layer)
    ]


def share_out_layers(config: ModelConfig, count: int) -> list[Stage]:
    """The stages of a model that ``count`` devices share. A layer costs as much as it has weights;
    so does the head, and the sampler behind it a bit more.

    Raises:
        UnsupportedModelError: the architecture is not implemented.
        InvalidConfigError: there are fewer layers than stages.
    """
    model = empty_model(config, torch.float32, "meta", max_model_len=1)
    costs = [sum(weight.numel() for weight in layer.parameters()) for layer in model.layers]
    end = config.vocab_size * (config.hidden_size + SAMPLER_COLUMNS)
    runs = share_out(costs, end, count)
    return [Stage(index, count, run) for index, run in enumerate(runs)]


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of ``config`` must hold; allocates none."""
    model = empty_model(config, torch.float32, "meta", max_model_len=1)
    return {name: tuple(view.shape) for name, view in checkpoint_places(model).items()}


@contextmanager
def _allocation(dtype: torch.dtype, device: torch.device | str) -> Iterator[None]:
    """New parameters get this dtype and device, so that model files need not mention either."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _checkpoint_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _is_redundant(model: CausalLM, name: str) -> bool:
    """Old checkpoints store rotary frequencies, and some store a tied head a second time."""
    if name == "lm_head.weight":
        return model.config.tie_word_embeddings
    return name.endswith(".rotary_emb.inv_freq")


def _check_names(places: dict[str, Tensor], names: list[str]) -> None:
    given = set(names)
    problems = {
        "lacks": [name for name in places if name not in given],
        "holds surplus": [name for name in names if name not in places],
    }
    found = [f"{verb} {_listing(wrong)}" for verb, wrong in problems.items() if wrong]
    if found:
        raise WeightsError(
            f"the checkpoint {' and '.join(found)}: it does not belong to this config.json"
        )


def _check_shapes(places: dict[str, Tensor], names: list[str], source: WeightSource) -> None:
    wrong = [
        f"{name} has shape {list(source.shape(name))}, expected {list(places[name].shape)}"
        for name in names
        if tuple(source.shape(name)) != tuple(places[name].shape)
    ]
    if wrong:
        raise WeightsError(f"the checkpoint does not fit its config.json: {_listing(wrong)}")


def _listing(items: list[str]) -> str:
    shown = ", ".join(items[:NAMES_PER_MESSAGE])
    rest = len(items) - NAMES_PER_MESSAGE
    return f"{shown} and {rest} more" if rest > 0 else shown
