"""config.json in all its dialects."""

import pytest

from mini_infer.core.errors import UnsupportedModelError
from mini_infer.core.model_config import ModelConfig

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}


def config_of(**fields: object) -> ModelConfig:
    return ModelConfig.from_dict(BASE | fields)


def test_head_dim_defaults_to_hidden_over_heads_and_can_stand_apart() -> None:
    assert config_of().head_dim == 8
    assert config_of(head_dim=32).head_dim == 32


def test_kv_heads_default_to_heads() -> None:
    assert config_of(num_key_value_heads=None).num_kv_heads == 8


def test_old_and_new_spelling_of_rotary_scaling_agree() -> None:
    old = config_of(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = config_of(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    assert old.rope == new.rope
    assert old.rope.theta == 5e5
    assert old.rope.factor == 2.0


def test_qwen2_has_qkv_biases_without_saying_so() -> None:
    assert config_of(architectures=["Qwen2ForCausalLM"]).attention_bias
    assert not config_of().attention_bias


def test_eos_ids_of_both_files_are_merged() -> None:
    config = ModelConfig.from_dict(BASE | {"eos_token_id": 2}, {"eos_token_id": [2, 7]})
    assert config.eos_token_ids == (2, 7)


@pytest.mark.parametrize("value", [0, -1, -64, 1.5, "x", [], True, 10**30])
@pytest.mark.parametrize(
    "name",
    [
        "num_attention_heads",
        "hidden_size",
        "num_hidden_layers",
        "num_key_value_heads",
        "vocab_size",
        "intermediate_size",
        "max_position_embeddings",
        "head_dim",
    ],
)
def test_an_absurd_size_names_its_field(name: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        config_of(**{name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 7}, "in pairs"),
        ({"hidden_size": 3}, "in pairs"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rms_norm_eps": "nan"}, "rms_norm_eps"),
        ({"rope_theta": -1}, "theta"),
        ({"rope_theta": "inf"}, "theta"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        (QWEN | {"sliding_window": -1, "max_window_layers": 0}, "sliding_window"),
    ],
)
def test_numbers_that_would_fail_in_the_first_step(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_of(**fields)


def test_qwen_uses_its_window_only_when_switched_on() -> None:
    fields = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 2}
    assert config_of(**fields).sliding_window is None
    switched_on = config_of(**fields, use_sliding_window=True)
    assert [switched_on.layer_sliding_window(i) for i in range(4)] == [None, None, 32, 32]


def test_mistral_slides_in_every_layer_and_llama_in_none() -> None:
    mistral = config_of(architectures=["MistralForCausalLM"], sliding_window=16)
    assert mistral.sliding_layers == (True,) * 4
    assert config_of(sliding_window=16).sliding_window is None


def test_layer_types_say_which_layers_slide() -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    config = config_of(**QWEN, sliding_window=16, layer_types=kinds)
    assert [config.layer_sliding_window(i) for i in range(4)] == [None, 16, None, 16]


def test_a_window_that_no_layer_uses_is_none() -> None:
    config = config_of(**QWEN, sliding_window=16, layer_types=["full_attention"] * 4)
    assert config.sliding_window is None
    assert config.sliding_layers == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": []}, "architectures"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"vocab_size": "many"}, "malformed"),
        ({**QWEN, "sliding_window": 8, "layer_types": ["full_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"architectures": "LlamaForCausalLM"}, "names no 'architectures'"),
        ({"architectures": 1}, "names no 'architectures'"),
        ({"eos_token_id": float("inf")}, "malformed"),
        ({"rope_scaling": "linear"}, "malformed"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' lacks its 'factor'"),
        ({"rope_scaling": {"type": "dynamic"}}, "'dynamic' lacks its 'factor'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "'llama3' lacks its 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a number above 0"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0}}, "original_max"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": -1}}, "beta_slow"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(
    fields: dict[str, object], words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        config_of(**fields)


@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"]
)
def test_a_missing_field_is_named(name: str) -> None:
    config = {key: value for key, value in BASE.items() if key != name}
    with pytest.raises(UnsupportedModelError, match=name):
        ModelConfig.from_dict(config)


def test_yarn_without_a_factor_stretches_to_the_context() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 64}
    assert config_of(rope_scaling=scaling).rope.factor == 4.0
