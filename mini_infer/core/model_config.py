"""The shape of a model, read from a Hugging Face ``config.json`` (a GGUF is translated to one)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mini_infer.core.errors import UnsupportedModelError
from mini_infer.core.kv_layout import KVLayout

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
MAX_LAYERS = 10_000
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding and its context extension.

    ``linear`` divides positions by ``factor``; ``dynamic`` (NTK-aware) raises the base with the
    context; ``llama3`` rescales low frequencies only; ``yarn`` blends both (arXiv 2309.00071).
    """

    theta: float = 10000.0
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Of an architecture whose feed-forward networks are mixtures of experts, as DeepSeek-V2's
    (arXiv 2405.04434): a token goes to a few routed experts, and to all shared ones."""

    num_experts: int
    """Routed ones, of the whole model."""
    expert_size: int
    """Each one's inner size."""
    shared_size: int = 0
    """The inner size of the shared ones together; here, where that is cut."""
    start: int = 0
    stop: int | None = None
    """Where the routed experts that are here begin and end; None: all of them are."""

    @property
    def here(self) -> range:
        """The numbers of the routed experts that are here."""
        return range(self.start, self.num_experts if self.stop is None else self.stop)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything about an architecture that its layers, its cache and its scheduler need."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    """Per layer: does it use ``sliding_window``? Empty when none does."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """The checkpoint's own dtype."""
    experts: ExpertsConfig | None = None

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Translates the parsed ``config.json`` (and ``generation_config.json``, whose
        end-of-sequence ids come on top).

        Raises:
            UnsupportedModelError: a field is missing, malformed or asks for what isn't implemented.
        """
        architectures = config.get("architectures")
        if not architectures or not isinstance(architectures, list | tuple):
            raise UnsupportedModelError("config.json names no 'architectures'")
        try:
            return _from_dict(cls, str(architectures[0]), config, generation_config or {})
        except KeyError as error:
            raise UnsupportedModelError(f"config.json lacks {error.args[0]!r}") from None
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise UnsupportedModelError(f"config.json is malformed: {error}") from None

    @property
    def max_context(self) -> int:
        """Longest sequence: where rotary scaling stretches the trained length, that many times.

        Llama 3's configs give the stretched length as ``max_position_embeddings``.
        """
        rope = self.rope
        if rope.rope_type in ("default", "llama3"):
            return self.max_position_embeddings
        trained = rope.original_max_position_embeddings or self.max_position_embeddings
        return max(self.max_position_embeddings, int(trained * rope.factor))

    @property
    def kv_layout(self) -> KVLayout:
        """What a token leaves in each layer's cache."""
        return KVLayout(self.num_kv_heads, self.head_dim)

    def layer_sliding_window(self, layer: int) -> int | None:
        """The attention window of one layer in tokens, None for full attention."""
        if self.sliding_layers and self.sliding_layers[layer]:
            return self.sliding_window
        return None


def _from_dict(
    cls: type[ModelConfig],
    architecture: str,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
) -> ModelConfig:
    num_heads = _size(config, "num_attention_heads")
    hidden_size = _size(config, "hidden_size")
    num_layers = _size(config, "num_hidden_layers", MAX_LAYERS)
    max_position_embeddings = _size(config, "max_position_embeddings")
    num_kv_heads = num_heads
    if config.get("num_key_value_heads") is not None:
        num_kv_heads = _size(config, "num_key_value_heads")
    head_dim = hidden_size // num_heads
    if config.get("head_dim") is not None:
        head_dim = _size(config, "head_dim")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"a head of {head_dim} numbers can't be rotated in pairs")
    rms_norm_eps = float(config.get("rms_norm_eps", 1e-6))
    if not 0 <= rms_norm_eps < 1:
        raise ValueError(f"rms_norm_eps must be in [0, 1), got {rms_norm_eps}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads do not divide into {num_kv_heads} KV heads")
    hidden_act = str(config.get("hidden_act", "silu"))
    if hidden_act != "silu":
        raise UnsupportedModelError(f"hidden_act {hidden_act!r} is not supported, only 'silu'")
    if config.get("quantization_config"):
        raise UnsupportedModelError("quantised safetensors checkpoints are not supported")
    sliding_window, sliding_layers = _sliding(architecture, config, num_layers)
    eos_token_ids = _token_ids(config.get("eos_token_id"))
    for token_id in _token_ids(generation_config.get("eos_token_id")):
        if token_id not in eos_token_ids:
            eos_token_ids += (token_id,)
    bos = _token_ids(config.get("bos_token_id"))
    return cls(
        architecture=architecture,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=rms_norm_eps,
        rope=_rope(config, max_position_embeddings),
        hidden_act=hidden_act,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        # Qwen2 always has biases on Q, K and V, and its config does not say so.
        attention_bias=bool(config.get("attention_bias", architecture == "Qwen2ForCausalLM")),
        mlp_bias=bool(config.get("mlp_bias", False)),
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos_token_ids,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _size(config: Mapping[str, Any], name: str, limit: int = 2**31 - 1) -> int:
    """A whole number that a tensor can have as a dimension."""
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise ValueError(f"{name} must be a whole number from 1 to {limit}, got {value!r:.80}")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(value),)


def _sliding(
    architecture: str, config: Mapping[str, Any], num_layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    """Window and the layers that use it, by each family's own rule.

    Mistral slides everywhere, Llama nowhere, Qwen where ``layer_types`` says so or, in older
    configs, from layer ``max_window_layers`` on, and only when switched on.
    """
    window = config.get("sliding_window")
    if window is None or architecture.startswith("Llama"):
        return None, ()
    if not architecture.startswith("Qwen"):
        return _size(config, "sliding_window", 2**63 - 1), (True,) * num_layers
    if not config.get("use_sliding_window", False):
        return None, ()
    layer_types = config.get("layer_types")
    if layer_types:
        if len(layer_types) != num_layers:
            raise ValueError(f"{len(layer_types)} layer_types for {num_layers} layers")
        layers = tuple(kind == "sliding_attention" for kind in layer_types)
    else:
        first = int(config.get("max_window_layers", 28))
        layers = tuple(layer >= first for layer in range(num_layers))
    if not any(layers):
        return None, ()
    return _size(config, "sliding_window", 2**63 - 1), layers


def _rope(config: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Reads ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (older)."""
    scaling = dict(config.get("rope_scaling") or {})
    scaling.update(config.get("rope_parameters") or {})
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise UnsupportedModelError(f"rotary scaling {rope_type!r} is not supported, only {known}")
    if float(scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1:
        raise UnsupportedModelError("partial rotary embedding is not supported")
    original = max_position_embeddings
    if scaling.get("original_max_position_embeddings") is not None:
        original = _size(scaling, "original_max_position_embeddings")

    def optional(name: str) -> float | None:
        return None if scaling.get(name) is None else float(scaling[name])

    def number(name: str, default: float | None, above: float = 0.0) -> float:
        value = default if scaling.get(name) is None else scaling[name]
        if value is None:
            raise ValueError(f"rotary scaling {rope_type!r} lacks its {name!r}")
        if not above < float(value) < math.inf:
            raise ValueError(f"rotary {name} must be a number above {above}, got {value}")
        return float(value)

    # Only YaRN knows its factor otherwise, from its two lengths.
    factors = {"default": 1.0, "yarn": max_position_embeddings / original}
    low = number("low_freq_factor", 1.0)

    return RopeConfig(
        theta=number("rope_theta", config.get("rope_theta") or 10000.0, above=1.0),
        rope_type=rope_type,
        factor=number("factor", factors.get(rope_type)),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=number("high_freq_factor", 4.0, above=low),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=bool(scaling.get("truncate", True)),
    )
