"""The command line is generated from ``EngineConfig``: nothing missing, nothing retyped."""

from typing import Any

import click
import pytest
from click.testing import CliRunner

from mini_infer.cli.options import given, with_engine_options
from mini_infer.core.engine_config import engine_options


def parse(*arguments: str) -> dict[str, Any]:
    received: dict[str, Any] = {}

    @click.command()
    @with_engine_options
    def command(**options: Any) -> None:
        received.update(options)

    result = CliRunner().invoke(command, arguments)
    if result.exit_code:
        raise click.UsageError(result.output)
    return received


def test_every_engine_option_is_there_and_unset() -> None:
    options = parse()
    assert list(options) == list(engine_options())
    assert given(options) == {}


@pytest.mark.parametrize("name", engine_options())
def test_auto_is_the_same_as_nothing(name: str) -> None:
    if engine_options()[name]["kind"] is not bool:
        assert given(parse("--" + name.replace("_", "-"), "auto")) == {}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--block-size", "32"), {"block_size": 32}),
        (("--model", "some/model"), {"model": "some/model"}),
        (("--dtype", "float32"), {"dtype": "float32"}),
        (("--kv-cache-memory", "2GiB"), {"kv_cache_memory": "2GiB"}),
        (("--gpu-memory-utilization", "0.5"), {"gpu_memory_utilization": 0.5}),
        (("--speculative-config", '{"a": 1}'), {"speculative_config": '{"a": 1}'}),
        (("--dry-run",), {"dry_run": True}),
        (("--no-dry-run",), {"dry_run": False}),
        (("--no-prefix-caching",), {"enable_prefix_caching": False}),
        (("--no-enable-prefix-caching",), {"enable_prefix_caching": False}),
        (("--enable-chunked-prefill",), {"enable_chunked_prefill": True}),
        (("--chunked-prefill",), {"enable_chunked_prefill": True}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_given_arrives(arguments: tuple[str, ...], expected: dict[str, Any]) -> None:
    assert given(parse(*arguments)) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--block-size", "1.5"), "is not a whole number"),
        (("--gpu-memory-utilization", "half"), "is not a number"),
        (("--dtype", "int3"), "is not one of auto, float32, float16, bfloat16"),
    ],
)
def test_wrong_kind_names_the_option(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        parse(*arguments)
    assert message in caught.value.message
    assert arguments[0] in caught.value.message


def test_help_shows_text_and_default() -> None:
    command = click.command()(with_engine_options(lambda **options: None))
    text = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    for name, option in engine_options().items():
        assert "--" + name.replace("_", "-") in text
        assert option["help"].split(",")[0].split(" ")[0] in text
    assert "[default: smollm2-135m]" in text
    assert "[auto|float32|float16|bfloat16]" in text
    assert "--speculative-config JSON Speculative decoding" in text
