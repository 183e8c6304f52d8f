"""What every decoder-only language model is: embedding, blocks, norm, head."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from mini_infer.core.model_config import ModelConfig
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.layers import Embedding, Linear, RMSNorm
from mini_infer.modeling.profiling import layer_range
from mini_infer.modeling.rotary import RotaryEmbedding
from mini_infer.modeling.stage import Elsewhere, Stage, whole
from mini_infer.parallel.group import SINGLE, TensorParallelGroup


class CausalLM(nn.Module, ABC):
    """A decoder-only transformer over one packed batch: no padding, no phases.

    An architecture says what its blocks are (``build_layer``). Modules carry the names of the
    Hugging Face checkpoint without its leading ``model.``.
    """

    packed_names: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    """Name of a packed projection -> what a checkpoint calls its parts, in row order."""

    def __init__(
        self, config: ModelConfig, max_model_len: int | None = None, stage: Stage | None = None
    ) -> None:
        """``max_model_len`` bounds the positions; by default the config's own limit. What another
        ``stage`` has is not here: by default there is one."""
        super().__init__()
        self.config = config
        self.whole_config = config
        """The whole model's, where this is a rank's part of it."""
        self.group: TensorParallelGroup = SINGLE
        """The ranks that have its parts. All of them call the model alike."""
        self.kv_layout = config.kv_layout
        self.rotary = RotaryEmbedding(config, max_model_len or config.max_position_embeddings)
        self.stage = stage or whole(config.num_layers)
        """The layers that are here, and whether embedding and head are."""
        if self.stage.has_table(config.tie_word_embeddings):
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            self.build_layer(config, layer) if layer in self.stage.layers else Elsewhere()
            for layer in range(config.num_layers)
        )
        if self.stage.is_last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = Linear(config.hidden_size, config.vocab_size)
            if config.tie_word_embeddings:
                self.lm_head.weight = self.embed_tokens.weight

    @abstractmethod
    def build_layer(self, config: ModelConfig, layer: int) -> nn.Module:
        """The block at depth ``layer``; it is called as a ``DecoderLayer`` is."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[KVCache],
        meta: AttentionMetadata,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Computes the step's tokens and writes their keys and values into ``caches``.

        ``token_ids, positions [T]`` int64 -> the residual stream ``[T, hidden]``; or that of the
        tokens ``wanted [W]`` only, ``[W, hidden]``. A prompt wants its last one: no later layer
        reads what the last block makes of the others, so that is not computed. With the first few
        ``caches`` only, just their layers run: an early exit.
        """
        x: Tensor = self.embed_tokens(token_ids)
        rope = self.rotary(positions)
        last = len(caches) - 1
        for depth, (layer, cache) in enumerate(zip(self.layers, caches, strict=False)):
            with layer_range(depth):
                x = layer(x, rope, cache, meta, wanted if depth == last else None)
        return x

    def compute_logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows of the residual stream ``[R, hidden]``, already gathered -> ``[R, vocab]``.

        ``out`` is where to put them, for a CUDA graph.
        """
        logits: Tensor = self.lm_head(x, self.norm, out)
        return logits
