"""Options: each documented once, defaults declared beside it, contradictions refused."""

from dataclasses import FrozenInstanceError, fields

import pytest

from mini_infer.core.engine_config import AUTO, MAX_DEPTH, EngineConfig, engine_options
from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.speculative_config import SpeculativeConfig
from tests.runtime.fake_executor import make_config


def test_every_option_explains_itself() -> None:
    options = engine_options()
    assert len(options) > 15
    for name, option in options.items():
        assert option["help"].endswith("."), name
        assert option["help"][0].isupper() or option["help"][0] == "-", name
        assert option["kind"] in (str, int, float, bool, SpeculativeConfig), name
        assert not option["choices"] or option["default"] in (AUTO, *option["choices"]), name


def test_every_field_but_what_the_resolver_finds_is_an_option() -> None:
    names = {item.name for item in fields(EngineConfig)}
    assert names - engine_options().keys() == {"model_config"}


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        make_config().block_size = 8  # type: ignore[misc]


def test_what_auto_stands_for_must_be_decided_first() -> None:
    with pytest.raises(TypeError, match="missing"):
        EngineConfig(model_config=make_config().model_config)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("max_model_len", "block_size", "blocks"), [(16, 4, 4), (17, 4, 5), (2, 16, 1), (5, 1, 5)]
)
def test_blocks_of_the_longest_request(max_model_len: int, block_size: int, blocks: int) -> None:
    config = make_config(max_model_len=max_model_len, block_size=block_size)
    assert config.max_blocks_per_request == blocks


@pytest.mark.parametrize(
    "name", ["max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "depth"]
)
@pytest.mark.parametrize("value", [0, -5])
def test_counts_start_at_one(name: str, value: int) -> None:
    with pytest.raises(InvalidConfigError, match=name):
        make_config(**{name: value})


def test_steps_in_flight_are_few() -> None:
    make_config(depth=MAX_DEPTH)
    with pytest.raises(InvalidConfigError, match=f"depth must be at most {MAX_DEPTH}, got 50"):
        make_config(depth=50)


def test_a_context_holds_a_prompt_and_an_answer() -> None:
    make_config(max_model_len=2)
    with pytest.raises(InvalidConfigError, match="max_model_len must be 2 or more"):
        make_config(max_model_len=1)


def test_whole_prompts_must_fit_a_step() -> None:
    with pytest.raises(InvalidConfigError, match=r"\(64\).*\(256\)"):
        make_config(enable_chunked_prefill=False)
    make_config(enable_chunked_prefill=False, max_num_batched_tokens=256)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_of_memory_that_can_not_be(share: float) -> None:
    with pytest.raises(InvalidConfigError, match="gpu_memory_utilization"):
        make_config(gpu_memory_utilization=share)
