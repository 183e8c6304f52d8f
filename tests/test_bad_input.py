"""Bad input, each kind as people meet it: in Python, on the command line, and over HTTP.

``tests/serving/test_errors.py`` and ``tests/cli/test_main.py`` have the fields and options whose
mistakes need no model; here are those that do, and that whoever else is served notices nothing.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi.testclient import TestClient

from mini_infer import LLM, SamplingParams
from mini_infer.cli.main import main
from mini_infer.core.errors import (
    InvalidConfigError,
    InvalidRequestError,
    MiniInferError,
    ModelNotFoundError,
    OutOfMemoryError,
    PromptTooLongError,
    UnsupportedModelError,
    WeightsError,
)
from mini_infer.serving.app import create_app
from tests.runtime.engine_host import threaded
from tests.serving.live import CHAT, COMPLETIONS

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_INFER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be damaged."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


@pytest.fixture
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), dtype="float32", num_kv_blocks=4, device="cpu") as llm:
        yield llm


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def without_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder


def unsupported(folder: Path) -> Path:
    change_config(folder, architectures=["MambaForCausalLM"])
    return folder


def truncated_safetensors(folder: Path) -> Path:
    cut(folder / "model.safetensors", 0.7)
    return folder


def truncated_header(folder: Path) -> Path:
    cut(folder / "model.safetensors", 0.001)
    return folder


def truncated_gguf(folder: Path) -> Path:
    path = folder / "cut.gguf"
    shutil.copy(next(folder.parents[1].rglob("tiny.gguf")), path)
    cut(path, 0.7)
    return path


def pickled(folder: Path) -> Path:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder


def misshapen(folder: Path) -> Path:
    change_config(folder, intermediate_size=80)
    return folder


def surplus(folder: Path) -> Path:
    change_config(folder, num_hidden_layers=1)
    return folder


def missing(folder: Path) -> Path:
    change_config(folder, num_hidden_layers=3)
    return folder


def without_tokenizer(folder: Path) -> Path:
    (folder / "tokenizer.json").unlink()
    return folder


def no_such_folder(folder: Path) -> Path:
    return folder / "nowhere"


MODELS: list[tuple[Callable[[Path], Path], type[MiniInferError], str]] = [
    (without_config, ModelNotFoundError, "has no config.json"),
    (unsupported, UnsupportedModelError, "LlamaForCausalLM"),
    (truncated_safetensors, WeightsError, "model.safetensors is truncated or corrupt"),
    (truncated_header, WeightsError, "model.safetensors is truncated or corrupt"),
    (truncated_gguf, WeightsError, "cut.gguf: truncated"),
    (pickled, WeightsError, "pytorch_model.bin), which can run code"),
    (misshapen, WeightsError, "mlp.gate_proj.weight has shape [64, 32], expected [80, 32]"),
    (surplus, WeightsError, "holds surplus model.layers.1."),
    (missing, WeightsError, "lacks model.layers.2."),
    (without_tokenizer, ModelNotFoundError, "tokenizer.json"),
    (no_such_folder, ModelNotFoundError, "nowhere"),
]


@pytest.mark.parametrize(("damage", "error", "text"), MODELS)
def test_a_model_that_can_not_be_used(
    damage: Callable[[Path], Path],
    error: type[MiniInferError],
    text: str,
    folder: Path,
    tiny_gguf: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(tiny_gguf, folder.parent / "tiny.gguf")
    model = str(damage(folder))
    with pytest.raises(error) as raised:
        LLM(model, dtype="float32", device="cpu")
    assert text in str(raised.value)
    for command in (["generate", "--prompt", "x"], ["serve", "--port", "0"], ["chat"]):
        assert main([*command, "--model", model]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        assert text in captured.err


def test_an_unsupported_architecture_lists_all_that_are_supported(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"MambaForCausalLM.*Llama.*Qwen2.*Qwen3"):
        LLM(str(unsupported(folder)))


MEMORY: list[tuple[dict[str, Any], str]] = [
    ({"kv_cache_memory": 1}, "holds no KV block"),
    ({"kv_cache_memory": "100b"}, "raise kv_cache_memory or lower block_size"),
]


@pytest.mark.parametrize(("options", "text"), MEMORY)
def test_too_little_memory_for_the_kv_cache(
    tiny_folder: Path, options: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OutOfMemoryError, match=text):
        LLM(str(tiny_folder), device="cpu", **options)
    size = str(options["kv_cache_memory"])
    line = ["generate", "--model", str(tiny_folder), "--prompt", "x", "--kv-cache-memory", size]
    assert main(line) == 1
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_too_little_memory_for_the_weights(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Memory:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    options: dict[str, Any] = {"kv_cache_memory": "1MiB", "device": "cpu"}
    with pytest.raises(OutOfMemoryError, match=r"need .* GiB in float16, .* GiB are free"):
        LLM(str(tiny_folder), **options)
    line = ["generate", "--model", str(tiny_folder), "--prompt", "x", "--kv-cache-memory", "1MiB"]
    assert main(line) == 1
    assert "GiB are free" in capsys.readouterr().err


@pytest.mark.parametrize("size", [0, -16])
def test_blocks_of_no_token(size: int, tiny_folder: Path) -> None:
    with pytest.raises(InvalidConfigError, match=f"block_size must be 1 or more, got {size}"):
        LLM(str(tiny_folder), block_size=size, device="cpu")


def test_a_context_beyond_the_models(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidConfigError, match=r"5000 exceeds the model's context of 128"):
        LLM(str(tiny_folder), max_model_len=5000)
    line = ["generate", "--model", str(tiny_folder), "--prompt", "x", "--max-model-len", "5000"]
    assert main(line) == 2
    assert "5000 exceeds the model's context of 128" in capsys.readouterr().err


PROMPTS: list[tuple[Any, dict[str, Any], type[InvalidRequestError], str]] = [
    ("", {}, InvalidRequestError, "empty"),
    ([[]], {}, InvalidRequestError, "empty"),
    ([[1, 2, 10**6]], {}, InvalidRequestError, "vocabulary"),
    ([[1, -1]], {}, InvalidRequestError, "vocabulary"),
    ([[1.5]], {}, InvalidRequestError, "token ids"),
    ([None], {}, InvalidRequestError, "prompt"),
    ([[1] * 129], {}, PromptTooLongError, "129 tokens"),
    ([[1] * 100], {}, PromptTooLongError, "KV cache (64 tokens"),
    ("x", {"max_tokens": 128}, PromptTooLongError, "128"),
    ("x", {"max_tokens": 100}, PromptTooLongError, "KV cache (64 tokens"),
    ("x", {"logit_bias": {10**6: 1.0}}, InvalidRequestError, "vocabulary"),
    ("x", {"stop_token_ids": [10**6]}, InvalidRequestError, "vocabulary"),
    ("x", {"allowed_token_ids": [10**6]}, InvalidRequestError, "vocabulary"),
]


@pytest.mark.parametrize(("prompt", "fields", "error", "text"), PROMPTS)
def test_a_request_that_can_not_be_served_while_another_runs(
    llm: LLM, prompt: Any, fields: dict[str, Any], error: type[MiniInferError], text: str
) -> None:
    expected = llm.generate("hello 123", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    running = llm.stream("hello 123", GREEDY)
    token_ids = [*next(running).token_ids]
    with pytest.raises(error) as raised:
        llm.generate(prompt, SamplingParams(**{"max_tokens": 4, **fields}), use_tqdm=False)
    assert text in str(raised.value)
    token_ids += [token for delta in running for token in delta.token_ids]
    assert token_ids == expected
    assert llm.engine.scheduler.cache.num_used_blocks == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("n", 0),
    ],
)
def test_a_parameter_out_of_range_is_refused_at_once(field: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=field) as raised:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert raised.value.param == field


@pytest.fixture
def raising_folder(folder: Path) -> Path:
    """A model whose template refuses system messages, as some real ones do."""
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        path = folder / name
        if path.exists() and name.endswith("json"):
            settings = json.loads(path.read_text())
            settings.pop("chat_template", None)
            path.write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('this model takes no system message') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    return folder


def test_a_chat_template_that_raises(
    raising_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    system: Any = [{"role": "system", "content": "Be brief."}, *HELLO]
    text = "this model takes no system message"
    llm = LLM(str(raising_folder), num_kv_blocks=16, device="cpu")
    with pytest.raises(InvalidRequestError, match=text):
        llm.chat(system, GREEDY, use_tqdm=False)
    assert llm.chat(HELLO, GREEDY, use_tqdm=False)
    with TestClient(create_app(threaded(llm.engine))) as client:
        for stream in (False, True):
            refused = client.post(CHAT, json={"messages": system, "stream": stream})
            assert refused.status_code == 400
            assert text in refused.json()["error"]["message"]
            assert refused.json()["error"]["param"] == "messages"
        assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 4}).status_code == 200


def test_over_http_on_a_small_pool(llm: LLM) -> None:
    """What never fits the pool or the vocabulary is 400 and says why; others are answered."""
    with TestClient(create_app(threaded(llm.engine))) as client:
        for body, text in (
            ({"prompt": [1] * 100}, "KV cache (64 tokens"),
            ({"prompt": [1] * 200}, "200 tokens"),
            ({"prompt": [10**6]}, "vocabulary"),
            ({"prompt": "x", "max_tokens": 1000}, "1000"),
        ):
            refused = client.post(COMPLETIONS, json=body)
            assert refused.status_code == 400, body
            assert text in refused.json()["error"]["message"]
            good = client.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 4})
            assert good.status_code == 200
    assert llm.engine.scheduler.cache.num_used_blocks == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prompt", ""], "empty"),
        (["--prompt", "x" * 9000], "9000"),
        (["--prompt", "x", "--top-p", "0"], "top_p"),
        (["--prompt", "x", "--temperature", "inf"], "temperature"),
        (["--prompt", "x" * 100, "--num-kv-blocks", "3"], "KV cache (48 tokens"),
    ],
)
def test_on_the_command_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--dry-run", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert text in captured.err
