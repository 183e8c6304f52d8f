"""A GGUF file, opened with every length checked, so that a damaged file is a clear error."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from mini_infer.core.errors import UnsupportedModelError, WeightsError

SUPPORTED_TYPES = {
    gguf.GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
}


class _CheckedReader(gguf.GGUFReader):  # type: ignore[misc]  # gguf ships no types
    """gguf's reader takes a slice past the end of the file for a short array; this one refuses it.

    It also names the tensor at fault, which gguf's own messages don't.
    """

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
    ) -> npt.NDArray[Any]:
        if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise WeightsError(f"the file is truncated: it ends at byte {len(self.data)}")
        array: npt.NDArray[Any] = super()._get(offset, dtype, count, override_order)
        return array

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name_bytes, _, dims, raw_type, offset = field.parts
            name = bytes(name_bytes).decode("utf-8", "replace")
            quantization = _supported_type(name, int(raw_type[0]))
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
            shape = [int(size) for size in dims]
            if not shape or shape[0] % block_size:
                raise WeightsError(
                    f"tensor {name} has rows of {shape[:1]} values, not whole {quantization.name} "
                    f"blocks of {block_size}"
                )
            num_elements = 1
            for size in shape:
                num_elements *= size
            end = start_offs + int(offset[0]) + num_elements // block_size * block_bytes
            if end > len(self.data):
                raise WeightsError(
                    f"the file is truncated: tensor {name} ends at byte {end}, "
                    f"the file at byte {len(self.data)}"
                )
        super()._build_tensors(start_offs, fields)


def _supported_type(tensor_name: str, raw_type: int) -> gguf.GGMLQuantizationType:
    try:
        quantization = gguf.GGMLQuantizationType(raw_type)
    except ValueError:
        quantization = None
    if quantization not in SUPPORTED_TYPES:
        label = f"number {raw_type}" if quantization is None else quantization.name
        known = ", ".join(kind.name for kind in sorted(SUPPORTED_TYPES))
        raise WeightsError(
            f"tensor {tensor_name} has quantisation type {label}; supported are {known}"
        )
    return quantization


class GGUFFile:
    """Metadata and memory-mapped tensors of one GGUF file.

    Raises:
        WeightsError: not a GGUF file, truncated, corrupt, or a tensor of an unsupported type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = _CheckedReader(path)
        except WeightsError as error:
            raise WeightsError(f"{path}: {error}") from None
        except OSError as error:
            raise WeightsError(f"{path} can't be read: {error.strerror or error}") from None
        except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
            raise WeightsError(f"{path} is not a valid GGUF file: {error}") from None
        if self._reader.byte_order != "I":
            raise WeightsError(f"{path} was written for a machine of the other byte order")
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def architecture(self) -> str:
        return str(self.require("general.architecture"))

    def keys(self) -> Iterable[str]:
        return self._reader.fields.keys()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key, as Python data, or ``default``."""
        field = self._reader.fields.get(key)
        if field is None:
            return default
        try:
            value = field.contents()
        except UnicodeDecodeError:
            raise WeightsError(f"{self.path}: metadata key {key} is not valid UTF-8") from None
        if field.types[0] == gguf.GGUFValueType.FLOAT32:
            # 1e-5 was stored as float32: the shortest decimal that means the same float32.
            return float(str(np.float32(value)))
        return value

    def require(self, key: str) -> Any:
        """Like ``get``, but a missing key is an UnsupportedModelError that names it."""
        value = self.get(key)
        if value is None:
            raise UnsupportedModelError(f"{self.path}: the GGUF metadata lacks {key!r}")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape with the rows first, as PyTorch has it (GGUF stores the fastest axis first)."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def dequantize(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor as float32, in ``shape(name)``; a fresh array, never a view of the file."""
        tensor = self.tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return np.array(values, dtype=np.float32).reshape(self.shape(name))
