"""What a safetensors file says of its tensors, without reading one.

The format: eight bytes with the length of a JSON text, that text, then the tensors' bytes without a
gap. https://huggingface.co/docs/safetensors
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mini_infer.core.errors import WeightsError

LENGTH_BYTES = 8
METADATA = "__metadata__"
FLOATING = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes are, and what they mean."""

    name: str
    path: Path
    offset: int
    """Of its first byte in the file."""
    nbytes: int
    shape: tuple[int, ...]
    format: str
    """The file's word for its dtype."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a weight.

        Raises:
            WeightsError: it is no floating-point number.
        """
        try:
            return FLOATING[self.format]
        except KeyError:
            raise WeightsError(
                f"{self.name} in {self.path} is stored as {self.format}, which is no "
                f"floating-point number: quantised safetensors can't be loaded, use a GGUF file "
                "or the checkpoint before its quantisation"
            ) from None

    def rows(self, part: range) -> "StoredTensor":
        """Some of its rows, which follow each other, as if they were a tensor."""
        row = self.nbytes // self.shape[0]
        shape = (len(part), *self.shape[1:])
        return replace(
            self, offset=self.offset + part.start * row, nbytes=len(part) * row, shape=shape
        )


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a file, in the order of their bytes.

    Raises:
        WeightsError: the file is missing, truncated or corrupt.
    """
    try:
        with safe_open(path, framework="pt"):  # checks sizes, overlaps and gaps against the file
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise unreadable(path, error) from None
    tensors = [
        StoredTensor(
            name=name,
            path=path,
            offset=LENGTH_BYTES + length + entry["data_offsets"][0],
            nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            shape=tuple(entry["shape"]),
            format=entry["dtype"],
        )
        for name, entry in header.items()
        if name != METADATA
    ]
    return sorted(tensors, key=lambda tensor: tensor.offset)


def unreadable(path: Path, error: object) -> WeightsError:
    """What to say of a file that can't be read; ``error`` says why."""
    if not path.is_file():
        return WeightsError(f"{path} is missing: download the checkpoint again")
    return WeightsError(f"{path} is truncated or corrupt ({error}): download the checkpoint again")
