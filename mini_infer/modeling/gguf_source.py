"""Weights of a GGUF file under Hugging Face names, dequantised to float32 one tensor at a time."""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from mini_infer.core.errors import WeightsError
from mini_infer.modeling.gguf_file import GGUFFile
from mini_infer.modeling.gguf_metadata import gguf_architecture, uniform
from mini_infer.modeling.weights import WeightSource

GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Tables that follow from the configuration: gguf_metadata reads the first, nothing the second.
IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
GLOBAL_TENSOR = re.compile(r"(\w+)\.(weight|bias)")


class GGUFSource(WeightSource):
    """A ``WeightSource`` over a GGUF file of a llama, qwen2 or qwen3 architecture.

    The file stays memory-mapped; ``get`` dequantises one tensor, so that the peak of a load is
    the model plus one tensor.

    Raises:
        WeightsError: the file is damaged, has an unsupported quantisation type, or a tensor
            whose name has no Hugging Face counterpart.
        UnsupportedModelError: an architecture that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        gguf_architecture(self._file)
        self._gguf_names = {
            hf_name(name, path): name for name in self._file.tensors if not IGNORED.fullmatch(name)
        }
        self._num_heads_of_permuted: dict[str, int] = {}
        if self._file.architecture == "llama":
            num_heads = uniform(self._file, "llama.attention.head_count")
            num_kv_heads = uniform(self._file, "llama.attention.head_count_kv", num_heads)
            self._num_heads_of_permuted = {"q_proj": num_heads, "k_proj": num_kv_heads}

    def names(self) -> Iterable[str]:
        """Hugging Face names, in the file's order."""
        return self._gguf_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._gguf_name(name)].shape

    def get(self, name: str) -> torch.Tensor:
        """The tensor in float32, in memory of its own."""
        return self._unpermuted(name, self._file.dequantize(self._gguf_name(name)))

    def get_part(self, name: str, dim: int, part: range) -> torch.Tensor:
        """See ``WeightSource.get_part``; of queries' and keys' rows whole heads. Of columns, which
        may begin within a block, all are dequantised."""
        if dim:
            return super().get_part(name, dim, part)
        return self._unpermuted(name, self._file.dequantize(self._gguf_name(name), part))

    def _unpermuted(self, name: str, rows: npt.NDArray[np.float32]) -> torch.Tensor:
        """Rows of a tensor of the file in Hugging Face's order."""
        tensor = torch.from_numpy(rows)
        num_heads = self._num_heads_of_permuted.get(name.split(".")[-2], 0)
        if not num_heads:
            return tensor
        head_dim = self.shape(name)[0] // num_heads
        return unpermute_rotary_rows(tensor, len(tensor) // head_dim)

    def _gguf_name(self, name: str) -> str:
        try:
            return self._gguf_names[name]
        except KeyError:
            raise WeightsError(f"{self._file.path} holds no tensor {name}") from None


def hf_name(gguf_name: str, path: Path) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if match := LAYER_TENSOR.fullmatch(gguf_name):
        layer, part, kind = match.groups()
        if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
    elif match := GLOBAL_TENSOR.fullmatch(gguf_name):
        part, kind = match.groups()
        if part in GLOBAL_NAMES:
            return f"{GLOBAL_NAMES[part]}.{kind}"
    raise WeightsError(f"{path}: tensor {gguf_name} belongs to no part of a supported model")


def unpermute_rotary_rows(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes the row order that llama.cpp's converter gives Q and K of the llama architecture.

    llama.cpp rotates neighbouring pairs of a head's rows (0, 1), (2, 3), ...; Hugging Face rotates
    row i with row i + head_dim / 2. The converter therefore interleaves each head's two halves.

    Args:
        tensor: [num_heads * head_dim, ...], weight or bias.
    """
    rows = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])  # [num_heads, head_dim / 2, 2, ...]
    return rows.transpose(1, 2).reshape(tensor.shape)
