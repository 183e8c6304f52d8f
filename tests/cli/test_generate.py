"""``mini-infer generate`` against the dry run."""

import io
import json

import pytest

from mini_infer.cli.main import main


def generate(*arguments: str) -> int:
    return main(["generate", "--dry-run", *arguments])


def json_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_json_holds_what_the_api_returns(capsys: pytest.CaptureFixture[str]) -> None:
    code = generate("--prompt", "hello", "--max-tokens", "8", "--temperature", "0", "--json")
    assert code == 0
    (output,) = json_lines(capsys)
    assert output["prompt"] == "hello"
    assert output["prompt_token_ids"] == list(b"hello")
    (choice,) = output["outputs"]  # type: ignore[misc]
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 8
    assert bytes(choice["token_ids"]).decode() == choice["text"]


def test_streamed_text_is_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", "hello", "--max-tokens", "50", "--temperature", "0")
    assert generate(*options) == 0
    streamed = capsys.readouterr().out
    assert generate(*options, "--json") == 0
    (output,) = json_lines(capsys)
    assert streamed == output["outputs"][0]["text"] + "\n"  # type: ignore[index]


def test_prompts_and_choices_keep_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ("--prompt", "one", "--prompt", "two", "--prompt", "three")
    assert generate(*prompts, "--n", "2", "--max-tokens", "5", "--json") == 0
    outputs = json_lines(capsys)
    assert [output["prompt"] for output in outputs] == ["one", "two", "three"]
    for output in outputs:
        assert [choice["index"] for choice in output["outputs"]] == [0, 1]  # type: ignore[attr-defined]
    assert generate(*prompts, "--n", "2", "--max-tokens", "5") == 0
    text = capsys.readouterr().out
    assert text.count("--- ") == 6
    assert text.index("'one'") < text.index("'two'") < text.index("'three'")


@pytest.mark.parametrize("arguments", [("--prompt", "-"), ()])
def test_prompt_from_standard_input(
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert generate(*arguments, "--max-tokens", "3", "--json") == 0
    assert json_lines(capsys)[0]["prompt"] == "from a pipe"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_standard_input_that_is_no_text(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 \xff\n"), "utf-8"))
    assert main([command, "--dry-run"]) == 2
    assert "is no utf-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--prompt", "-"), ()])
def test_empty_standard_input_is_an_error_before_the_model(
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["generate", "--model", "/no/such/model", *arguments]) == 2
    error = capsys.readouterr().err
    assert "standard input is empty" in error
    assert "/no/such/model" not in error


def test_no_prompt_on_a_terminal_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert generate() == 2
    assert "--prompt" in capsys.readouterr().err


def test_sampling_options_reach_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", "x", "--max-tokens", "300", "--logprobs", "2", "--json")
    assert generate(*options, "--ignore-eos") == 0
    choice = json_lines(capsys)[0]["outputs"][0]  # type: ignore[index]
    assert len(choice["token_ids"]) == 300
    assert len(choice["logprobs"]) == 300
    assert len(choice["logprobs"][0]) == 2
    assert generate(*options, "--stop", " ") == 0
    choice = json_lines(capsys)[0]["outputs"][0]  # type: ignore[index]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == " "
    assert " " not in choice["text"]


def test_seed_decides_what_is_sampled(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("7", "7", "8"):
        assert generate("--prompt", "x", "--max-tokens", "60", "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
