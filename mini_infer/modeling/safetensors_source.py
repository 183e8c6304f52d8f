"""A folder of safetensors: one file, or shards with an index."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mini_infer.core.errors import WeightsError
from mini_infer.modeling.safetensors_header import StoredTensor, read_header, unreadable
from mini_infer.modeling.weight_stream import stream_tensors
from mini_infer.modeling.weights import WeightSource

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")


class SafetensorsSource(WeightSource):
    """One tensor at a time through a memory map, or all of them streamed where a GPU wants them.

    Nothing is read until it is asked for.

    Raises:
        WeightsError: no safetensors, a truncated or corrupt file, a pickle checkpoint, or an index
            that contradicts its shards.
    """

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, StoredTensor] = {}
        for path in _files(folder):
            for tensor in read_header(path):
                if tensor.name in self._tensors:
                    other = self._tensors[tensor.name].path.name
                    raise WeightsError(
                        f"{tensor.name} is in both {other} and {path.name} of {folder}"
                    )
                self._tensors[tensor.name] = tensor
        _check_index(folder / INDEX_FILE, self._tensors)

    def names(self) -> Iterable[str]:
        """In the order of the files and of the bytes in them."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def get(self, name: str) -> Tensor:
        # Opened anew each time: the map lives as long as its handle, and a file whose pages have
        # all been touched would count against the process's memory until the end of the load.
        path = self._tensors[name].path
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise unreadable(path, error) from None
        return tensor

    def get_part(self, name: str, dim: int, part: range) -> Tensor:
        path = self._tensors[name].path
        which = (slice(None),) * dim + (slice(part.start, part.stop),)
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_slice(name)[which]
        except (SafetensorError, OSError) as error:
            raise unreadable(path, error) from None
        return tensor

    def load_into(
        self, places: dict[str, Tensor], rows: Mapping[str, range] | None = None
    ) -> Iterator[str]:
        tensors = [self._tensors[name] for name in places]
        for tensor in tensors:
            tensor.dtype  # noqa: B018 - raises where it is no weight's, before anything is read
        if any(place.is_cuda for place in places.values()):
            parts = rows or {}
            yield from stream_tensors(
                [
                    tensor.rows(parts[tensor.name]) if tensor.name in parts else tensor
                    for tensor in tensors
                ],
                places,
            )
        else:
            yield from super().load_into(places, rows)


def _files(folder: Path) -> list[Path]:
    """The shards that the index lists, else the single file, else every safetensors file."""
    index = folder / INDEX_FILE
    if index.is_file():
        return [folder / name for name in sorted(set(_weight_map(index).values()))]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise WeightsError(
            f"{folder} holds only pickle files ({', '.join(pickles)}), which can run code when "
            "loaded and are refused: convert the checkpoint to safetensors or GGUF"
        )
    raise WeightsError(f"{folder} holds no *.safetensors file")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): Path(str(file)).name for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not an index of safetensors shards: {error!r}") from None


def _check_index(index: Path, tensors: dict[str, StoredTensor]) -> None:
    if not index.is_file():
        return
    for name, file in _weight_map(index).items():
        if name not in tensors or tensors[name].path.name != file:
            raise WeightsError(f"{index.name} places {name} in {file}, which does not hold it")
