"""Seeded random weights: reproducible, and alive enough to test an engine with."""

import pytest
import torch

from mini_infer.core.errors import UnsupportedModelError
from mini_infer.modeling.dummy_source import DummySource
from mini_infer.modeling.weights import build_model, checkpoint_places, empty_model
from tests.modeling.driver import PagedDriver
from tests.modeling.fakes import tiny_config

ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_seeds_give_equal_tensors_in_any_order(dtype: torch.dtype) -> None:
    config = tiny_config("Qwen3ForCausalLM")
    first, second = (DummySource(config, 7, dtype) for _ in range(2))
    names = list(first.names())
    values = {name: first.get(name) for name in names}
    for name in reversed(names):
        assert values[name].dtype == dtype
        assert torch.equal(values[name], second.get(name))


def test_seeds_and_names_give_different_tensors() -> None:
    config = tiny_config()
    name = "model.layers.0.self_attn.q_proj.weight"
    values = [
        DummySource(config, seed, torch.float32).get(tensor)
        for seed, tensor in ((0, name), (1, name), (0, name.replace("0", "1")))
    ]
    for i, value in enumerate(values):
        for other in values[:i]:
            assert not torch.equal(value, other)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_dummy_weights_is_alive(
    architecture: str, dtype: torch.dtype, tied: bool
) -> None:
    config = tiny_config(
        architecture,
        hidden_size=96,
        num_hidden_layers=8,
        vocab_size=200,
        attention_bias=True,
        tie_word_embeddings=tied,
    )
    source = DummySource(config, 0, dtype)
    assert all(float(source.get(name).float().abs().max()) > 0 for name in source.names())
    driver = PagedDriver(build_model(config, source, dtype))
    logits = driver.prefill("a", range(0, 200, 10), 64)
    assert bool(logits.isfinite().all())
    assert 0.3 < float(logits.std()) < 3.0
    assert len(set(logits.argmax(-1).tolist())) > 5


@pytest.mark.parametrize("hidden_size", [32, 256, 1024])
def test_logits_keep_their_spread_at_any_width(hidden_size: int) -> None:
    config = tiny_config(hidden_size=hidden_size, intermediate_size=2 * hidden_size)
    model = build_model(config, DummySource(config, 0, torch.float32), torch.float32)
    logits = PagedDriver(model).prefill("a", range(20), 64)
    assert 0.5 < float(logits.std()) < 2.0


def test_an_unsupported_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedModelError):
        DummySource(tiny_config("GPTForCausalLM"), 0, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_drawn_in_place_are_those_of_a_tensor_by_itself(dtype: torch.dtype) -> None:
    config = tiny_config("Qwen2ForCausalLM")
    source = DummySource(config, 3, dtype)
    model = empty_model(config, dtype)
    places = checkpoint_places(model)
    kept = dict(places)
    assert list(source.load_into(places)) == list(kept)
    assert not places
    assert all(torch.equal(place, source.get(name)) for name, place in kept.items())
