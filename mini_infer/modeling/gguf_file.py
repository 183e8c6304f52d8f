"""A GGUF file: metadata, and tensors dequantised one at a time.

The container (version 2 and 3) is read here, in one pass with every length checked: gguf's own
reader takes seconds for a vocabulary, keeps the whole file mapped, and does not notice where a
truncated file ends. The block formats of the tensors are gguf's.
"""

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from mini_infer.core.errors import UnsupportedModelError, WeightsError

SUPPORTED_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
)
MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

# Metadata value types: number in the file -> little-endian struct code; two have a length.
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
FLOAT32, STRING, ARRAY = 6, 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file, and how it is stored."""

    shape: tuple[int, ...]
    """Rows first, as PyTorch has it; the file lists the fastest axis first."""
    quantization: GGMLQuantizationType
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


class GGUFFile:
    """``metadata`` as Python data, and ``tensors`` by their GGUF name.

    Raises:
        WeightsError: not a GGUF file, truncated, corrupt, or a tensor of an unsupported type; the
            message names the file and, where one is at fault, the tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with (
                path.open("rb") as stream,
                mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                self._parse(_Cursor(data))
        except WeightsError as error:
            raise WeightsError(f"{path}: {error}") from None
        except UnicodeDecodeError:
            raise WeightsError(f"{path} is corrupt: a name or text is not valid UTF-8") from None
        except OSError as error:
            raise WeightsError(f"{path} can't be read: {error.strerror or error}") from None
        except ValueError:  # mmap of nothing
            raise WeightsError(f"{path} is empty") from None

    @property
    def architecture(self) -> str:
        return str(self.require("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(key, default)

    def require(self, key: str) -> Any:
        """Like ``get``, but a missing key is an UnsupportedModelError that names it."""
        if key not in self.metadata:
            raise UnsupportedModelError(f"{self.path}: the GGUF metadata lacks {key!r}")
        return self.metadata[key]

    def dequantize(self, name: str, part: range | None = None) -> npt.NDArray[np.float32]:
        """One tensor, or ``part`` of its rows, as float32, in memory of its own."""
        info = self.tensors[name]
        if part is not None and len(info.shape) == 1:  # a block holds several of its rows
            return self.dequantize(name)[part.start : part.stop]
        shape, offset, size = info.shape, info.offset, info.num_bytes
        if part is not None:
            row = info.num_bytes // info.shape[0]
            shape, size = (len(part), *info.shape[1:]), len(part) * row
            offset += part.start * row
        # Mapped anew each time: pages of a lasting map would count as this process's memory.
        raw = np.memmap(self.path, np.uint8, "r", offset, (size,))
        if info.quantization is GGMLQuantizationType.F32:
            return np.array(raw.view(np.float32).reshape(shape))
        if info.quantization is GGMLQuantizationType.F16:
            return raw.view(np.float16).reshape(shape).astype(np.float32)
        rows = raw.reshape(math.prod(shape[:-1]), -1)
        values = np.asarray(dequantize(rows, info.quantization), dtype=np.float32)
        return values.reshape(shape)

    def _parse(self, cursor: "_Cursor") -> None:
        if cursor.take(len(MAGIC)) != MAGIC:
            raise WeightsError("not a GGUF file: it does not begin with 'GGUF'")
        version = cursor.scalar("I")
        if version not in VERSIONS:
            raise WeightsError(
                f"GGUF version {version} is not supported, only {VERSIONS} in little-endian order"
            )
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(num_keys):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        headers = list(_tensor_headers(cursor, num_tensors))
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise WeightsError(f"corrupt: general.alignment is {alignment!r}")
        data_start = -(-cursor.offset // alignment) * alignment
        for name, dimensions, raw_type, offset in headers:
            if name in self.tensors:
                raise WeightsError(f"corrupt: two tensors are named {name}")
            info = _tensor_info(name, dimensions, raw_type, data_start + offset)
            end = info.offset + info.num_bytes
            if end > len(cursor.data):
                raise WeightsError(
                    f"truncated: tensor {name} ends at byte {end}, the file at {len(cursor.data)}"
                )
            self.tensors[name] = info


def _tensor_headers(
    cursor: "_Cursor", num_tensors: int
) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """Name, dimensions (fastest first), type number and offset into the data of each tensor."""
    for _ in range(num_tensors):
        name = cursor.text()
        num_dimensions = cursor.scalar("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise WeightsError(f"corrupt: tensor {name} has {num_dimensions} dimensions")
        dimensions = cursor.unpack(f"<{num_dimensions}Q")
        yield name, dimensions, cursor.scalar("I"), cursor.scalar("Q")


def _tensor_info(name: str, dimensions: tuple[int, ...], raw_type: int, offset: int) -> TensorInfo:
    if raw_type not in SUPPORTED_TYPES:
        try:
            label = GGMLQuantizationType(raw_type).name
        except ValueError:
            label = f"number {raw_type}"
        known = ", ".join(kind.name for kind in SUPPORTED_TYPES)
        raise WeightsError(f"tensor {name} has quantisation type {label}; supported: {known}")
    quantization = GGMLQuantizationType(raw_type)
    block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    if math.prod(dimensions) == 0 or dimensions[0] % block_size:
        raise WeightsError(
            f"corrupt: tensor {name} of dimensions {dimensions} is not made of whole "
            f"{quantization.name} blocks of {block_size}"
        )
    num_bytes = math.prod(dimensions) // block_size * block_bytes
    return TensorInfo(tuple(reversed(dimensions)), quantization, offset, num_bytes)


class _Cursor:
    """Reads little-endian values in order, and never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def take(self, size: int) -> bytes:
        end = self.offset + size
        if end > len(self.data):
            raise WeightsError(f"truncated: the metadata goes on after byte {len(self.data)}")
        taken = self.data[self.offset : end]
        self.offset = end
        return taken

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def scalar(self, code: str) -> Any:
        return self.unpack(f"<{code}")[0]

    def text(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        """A metadata value of this type: int, float, bool, str, or a list of one of them."""
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        if kind not in SCALARS:
            raise WeightsError(f"corrupt: metadata of unknown type {kind} at byte {self.offset}")
        value = self.scalar(SCALARS[kind])
        # 1e-5 was stored as float32: give the shortest decimal that means the same float32.
        return float(str(np.float32(value))) if kind == FLOAT32 else value

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind in SCALARS:
            size = struct.calcsize(SCALARS[kind])
            return list(struct.unpack(f"<{length}{SCALARS[kind]}", self.take(length * size)))
        if kind != STRING:
            raise WeightsError(f"corrupt: an array of type {kind} at byte {self.offset}")
        return [self.text() for _ in range(length)]
