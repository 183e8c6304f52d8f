"""Checkpoint tensors to parameters: where each goes, and what is said when one does not fit."""

import gc
import io
import random
import weakref
from typing import Any

import pytest
import torch
from tqdm import tqdm

from mini_infer.core.errors import UnsupportedModelError, WeightsError
from mini_infer.kernels.cpu_linear import has_blocked_products, has_float16_products
from mini_infer.modeling.layers import Layer, Linear, RMSNorm
from mini_infer.modeling.weights import (
    build_model,
    checkpoint_places,
    checkpoint_shapes,
    empty_model,
    load_weights,
)
from tests.modeling.driver import PagedDriver
from tests.modeling.fakes import MemorySource, random_tensors, tiny_config

ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
WEIGHT_AND_BIAS = ("weight", "bias")


def build(config: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> Any:
    """A loaded model before its layers rearrange what they hold."""
    model = empty_model(config, dtype)
    assert list(load_weights(model, MemorySource(tensors))) == [
        name for name in tensors if name in checkpoint_places(model)
    ]
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter_is_filled_exactly_once(architecture: str) -> None:
    config = tiny_config(architecture, attention_bias=True, mlp_bias=True)
    tensors = random_tensors(config)
    model = build(config, tensors)
    places = checkpoint_places(model)
    assert places.keys() == tensors.keys()
    for name, place in places.items():
        assert torch.equal(place, tensors[name])
    assert sum(p.numel() for p in model.parameters()) == sum(t.numel() for t in tensors.values())


def test_packed_projections_stack_their_parts_in_order() -> None:
    config = tiny_config("Qwen2ForCausalLM")
    tensors = random_tensors(config)
    layer = build(config, tensors).layers[1]
    for kind in ("weight", "bias"):
        parts = [tensors[f"model.layers.1.self_attn.{x}_proj.{kind}"] for x in "qkv"]
        assert torch.equal(getattr(layer.self_attn.qkv_proj, kind), torch.cat(parts))
    parts = [tensors[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(parts))


def test_a_tied_head_is_the_embedding_and_takes_no_memory() -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    assert "lm_head.weight" not in tensors
    model = build(config, tensors)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert not torch.equal(model.lm_head.weight, torch.zeros_like(model.lm_head.weight))


def test_an_untied_head_is_its_own() -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    model = build(config, tensors)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    assert torch.equal(model.embed_tokens.weight, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.bias",
        "model.layers.0.mlp.up_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str) -> None:
    config = tiny_config("Qwen2ForCausalLM")
    tensors = random_tensors(config)
    del tensors[name]
    with pytest.raises(WeightsError, match=f"lacks {name}"):
        build(config, tensors)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "score.weight",
    ],
)
def test_a_surplus_tensor_is_named(name: str) -> None:
    config = tiny_config()
    with pytest.raises(WeightsError, match=f"holds surplus {name}"):
        build(config, random_tensors(config) | {name: torch.ones(32)})


def test_missing_and_surplus_are_reported_together_and_long_lists_are_cut() -> None:
    config = tiny_config()
    tensors = {f"transformer.{name}": value for name, value in random_tensors(config).items()}
    with pytest.raises(WeightsError) as error:
        build(config, tensors)
    message = str(error.value)
    assert "lacks model.embed_tokens.weight" in message
    assert "surplus transformer.model.embed_tokens.weight" in message
    assert f"and {len(tensors) - 8} more" in message
    assert len(message) < 1500


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.k_proj.weight", (32, 32)),
        ("model.layers.0.mlp.down_proj.weight", (48, 32)),
        ("model.norm.weight", (31,)),
        ("lm_head.weight", (65, 32)),
        ("model.layers.1.input_layernorm.weight", (1,)),
    ],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(name: str, shape: tuple[int, ...]) -> None:
    config = tiny_config()
    expected = list(checkpoint_shapes(config)[name])
    with pytest.raises(WeightsError) as error:
        build(config, random_tensors(config) | {name: torch.ones(shape)})
    assert f"{name} has shape {list(shape)}, expected {expected}" in str(error.value)


def test_nothing_is_read_from_a_checkpoint_that_does_not_fit() -> None:
    class Unreadable(MemorySource):
        def get(self, name: str) -> torch.Tensor:
            raise AssertionError(name)

    config = tiny_config()
    tensors = random_tensors(config) | {"extra.weight": torch.ones(1)}
    with pytest.raises(WeightsError, match=r"extra\.weight"):
        build_model(config, Unreadable(tensors), torch.float32)


def test_harmless_extras_are_ignored() -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    extras = {
        "lm_head.weight": torch.ones(64, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.rotary_emb.inv_freq": torch.ones(4),
    }
    model = build(config, tensors | extras)
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])


def test_one_tensor_is_alive_at_a_time() -> None:
    class Watching(MemorySource):
        last: weakref.ref[torch.Tensor] | None = None

        def get(self, name: str) -> torch.Tensor:
            assert self.last is None or self.last() is None
            tensor = super().get(name)
            self.last = weakref.ref(tensor)
            return tensor

    gc.disable()
    try:
        config = tiny_config()
        build_model(config, Watching(random_tensors(config)), torch.float32)
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_parameters_have_the_asked_dtype_whatever_the_checkpoints(dtype: torch.dtype) -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    stored = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    before = torch.get_default_dtype()
    model = build(config, stored, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    expected = stored["model.norm.weight"].to(dtype)
    assert torch.equal(model.norm.weight, expected)
    assert torch.get_default_dtype() == before


@pytest.mark.parametrize(
    ("dtype", "arithmetic", "tolerance"),
    [(torch.float16, torch.float32, 2e-3), (torch.bfloat16, torch.bfloat16, 4e-2)],
)
def test_half_precision_stays_near_float32(
    dtype: torch.dtype, arithmetic: torch.dtype, tolerance: float
) -> None:
    config = tiny_config("Qwen2ForCausalLM")
    tensors = random_tensors(config)
    model = build(config, tensors, dtype)
    assert model.embed_tokens(torch.tensor([1])).dtype == arithmetic
    tokens = list(range(12))
    exact = PagedDriver(build(config, tensors)).prefill("a", tokens, 5)
    logits = PagedDriver(model).prefill("a", tokens, 5)
    assert logits.dtype == arithmetic
    logits = logits.float()
    torch.testing.assert_close(logits, exact, atol=tolerance, rtol=0)


def test_the_default_dtype_is_restored_after_a_failure() -> None:
    with pytest.raises(UnsupportedModelError):
        build_model(tiny_config("GPTForCausalLM"), MemorySource({}), torch.float16)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("order", ["sorted", "reversed", "shuffled"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_layer_finishes_once_as_soon_as_its_weights_are_there(
    order: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the checkpoint's order; a layer within another is finished before it."""
    config = tiny_config("Qwen2ForCausalLM", tie_word_embeddings=tied)
    tensors = random_tensors(config)
    names = sorted(tensors, reverse=order == "reversed")
    if order == "shuffled":
        random.Random(7).shuffle(names)
    read: list[str] = []
    finished: dict[Layer, int] = {}

    class Watching(MemorySource):
        def get(self, name: str) -> torch.Tensor:
            read.append(name)
            return super().get(name)

    def finish(layer: Layer) -> None:
        assert layer not in finished
        finished[layer] = len(read)

    for kind in (Layer, Linear, RMSNorm):
        monkeypatch.setattr(kind, "finish_loading", finish)
    source = Watching({name: tensors[name] for name in names})
    model = build_model(config, source, torch.float32)
    assert finished.keys() == {part for part in model.modules() if isinstance(part, Layer)}
    place = list(finished)
    for layer in finished:
        inner = [part for part in layer.modules() if part is not layer]
        assert all(place.index(part) < place.index(layer) for part in inner)  # type: ignore[arg-type]
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    qkv = [f"model.layers.1.self_attn.{part}_proj.{x}" for part in "qkv" for x in WEIGHT_AND_BIAS]
    for layer, needs in (
        (model.lm_head, [head]),
        (model.embed_tokens, ["model.embed_tokens.weight"]),
        (model.layers[1].self_attn.qkv_proj, qkv),
        (model.layers[1], [name for name in names if name.startswith("model.layers.1.")]),
    ):
        assert finished[layer] == 1 + max(names.index(name) for name in needs)  # type: ignore[index]


def test_packed_weights_leave_no_copy_behind() -> None:
    """Of float32 and float16 matrices only the packed form stays; of a tied one, the table too."""
    config = tiny_config(tie_word_embeddings=True)
    originals: list[weakref.ref[torch.Tensor]] = []

    class Watching(MemorySource):
        def get(self, name: str) -> torch.Tensor:
            assert sum(ref() is not None for ref in originals) == 0
            tensor = super().get(name)
            originals.append(weakref.ref(tensor))
            return tensor

    packed = {torch.float32: has_blocked_products(), torch.float16: has_float16_products()}
    for dtype in (dtype for dtype, offered in packed.items() if offered):
        model = build_model(config, Watching(random_tensors(config)), dtype)
        assert all(ref() is None for ref in originals)
        matrices = [name for name, value in model.named_parameters() if value.dim() == 2]
        assert matrices == ["embed_tokens.weight"]
        assert model.embed_tokens.weight.dtype == dtype


def test_positions_reach_max_model_len() -> None:
    config = tiny_config()
    source = MemorySource(random_tensors(config))
    assert build_model(config, source, torch.float32).rotary.table.shape == (128, 8)
    longer = build_model(config, source, torch.float32, max_model_len=200)
    assert longer.rotary.table.shape == (200, 8)


def test_a_progress_bar_counts_bytes_and_only_a_terminal_sees_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bars: list[tqdm[Any]] = []

    class Watched(tqdm):  # type: ignore[type-arg]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, file=terminal)
            bars.append(self)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = io.StringIO()
    monkeypatch.setattr("mini_infer.modeling.weights.tqdm", Watched)
    config = tiny_config(tie_word_embeddings=True)
    source = MemorySource(random_tensors(config))
    build_model(config, source, torch.bfloat16)
    assert not terminal.getvalue()
    terminal = Terminal()
    build_model(config, source, torch.bfloat16)
    assert terminal.getvalue()
    total = 2 * sum(tensor.numel() for tensor in source.tensors.values())
    assert bars[1].n == bars[1].total == total
    assert capsys.readouterr() == ("", "")
