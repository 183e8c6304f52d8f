"""A folder of safetensors: one file, or shards with an index."""

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mini_infer.core.errors import WeightsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")


class SafetensorsSource:
    """Reads tensors through a memory map; nothing is read until it is asked for.

    Raises:
        WeightsError: no safetensors, a truncated or corrupt file, a pickle checkpoint, or an index
            that contradicts its shards.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in _files(folder):
            self._read_header(path)
        _check_index(folder / INDEX_FILE, self._files)

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def get(self, name: str) -> Tensor:
        # Opened anew each time: the map lives as long as its handle, and a file whose pages have
        # all been touched would count against the process's memory until the end of the load.
        path = self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from None
        return tensor

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a handle, not a mapping
                    if name in self._files:
                        other = self._files[name].name
                        raise WeightsError(
                            f"{name} is in both {other} and {path.name} of {path.parent}"
                        )
                    self._files[name] = path
                    self._shapes[name] = tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from None


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


def _check_index(index: Path, files: dict[str, Path]) -> None:
    if not index.is_file():
        return
    for name, file in _weight_map(index).items():
        if name not in files or files[name].name != file:
            raise WeightsError(f"{index.name} places {name} in {file}, which does not hold it")


def _unreadable(path: Path, error: Exception) -> WeightsError:
    if not path.is_file():
        return WeightsError(f"{path} is missing: download the checkpoint again")
    return WeightsError(f"{path} is truncated or corrupt ({error}): download the checkpoint again")
