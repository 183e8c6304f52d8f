"""``mini-infer train-draft``: from a model to a head that drafts for it."""

import json
from pathlib import Path

import pytest

from mini_infer import LLM, SamplingParams
from mini_infer.cli.main import main

FEW = ("--num-tokens", "60", "--max-length", "48", "--epochs", "1", "--device", "cpu")


@pytest.mark.parametrize("drafting", ["--sequential", "--parallel"])
def test_a_trained_head_speculates(
    drafting: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tmp_path / "head"
    arguments = ["train-draft", "--model", str(tiny_folder), "--output", str(head), *FEW]
    assert main([*arguments, drafting]) == 0
    assert "held-out acceptance" in capsys.readouterr().out
    record = json.loads((head / "training.json").read_text())
    assert record["num_tokens"] > 0
    assert len(record["held_out"]) == 2
    options = {"model": str(tiny_folder), "max_model_len": 64, "device": "cpu"}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(**options) as llm:
        plain = llm.generate(["Hello"], params, use_tqdm=False)
    speculation = {"method": "head", "model": str(head), "num_speculative_tokens": 3}
    with LLM(**options, speculative_config=speculation) as llm:
        drafted = llm.generate(["Hello"], params, use_tqdm=False)
    assert drafted[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


def test_prompts_from_a_file(tiny_folder: Path, tmp_path: Path) -> None:
    """Also where a training was killed as it wrote its head."""
    prompts, head = tmp_path / "prompts.jsonl", tmp_path / "head"
    (head / ".new-killed").mkdir(parents=True)
    lines = ({"prompt": "one"}, {"turns": ["two", "then"]})
    prompts.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["train-draft", "--model", str(tiny_folder), "--output", str(head), *FEW]
    assert main([*arguments, "--prompts", str(prompts)]) == 0
    assert {path.name for path in head.iterdir()} == {
        "config.json",
        "model.safetensors",
        "training.json",
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--num-tokens", "0"), "num_tokens must be 1 or more"),
        (("--epochs", "0"), "epochs must be 1 or more"),
        (("--depth", "-1"), "depth must be 1 or more"),
        (("--learning-rate", "2"), "learning_rate must be between 0 and 1"),
        (("--max-length", "1"), "max_model_len must be 2 or more"),
        (("--model", "no/such"), "no/such"),
        (("--prompts", "nowhere.jsonl"), "does not exist"),
    ],
)
def test_what_can_not_be_trained(
    options: tuple[str, str],
    says: str,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = ("--model", str(tiny_folder), "--output", str(tmp_path / "head"))
    assert main(["train-draft", *given, *FEW, *options]) == 2
    assert says in capsys.readouterr().err


def test_other_files_are_not_mixed_with_a_head(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train-draft", "--model", str(tiny_folder), "--output", str(tiny_folder)]
    assert main(arguments) == 2
    assert "holds other files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no prompts"),
        ("{", "line 1"),
        ('{"prompt": "a"}\n[1]', "line 2"),
        ('{"turns": []}', "neither messages"),
        ('{"prompt": 3}', "neither messages"),
        ('{"prompt": "' + "word " * 99 + '"}', "raise it"),
    ],
)
def test_prompts_that_can_not_be_used(
    text: str,
    says: str,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(text)
    given = ("--model", str(tiny_folder), "--output", str(tmp_path / "head"))
    assert main(["train-draft", *given, *FEW, "--prompts", str(prompts)]) == 2
    assert says in capsys.readouterr().err


def test_too_many_layers_are_noticed_before_the_work(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("mini_infer.runtime.train_draft.write_texts", None)
    given = ("--model", str(tiny_folder), "--output", str(tmp_path / "head"))
    assert main(["train-draft", *given, *FEW, "--num-layers", "3"]) == 2
    assert "num_layers must be at most the model's own 2" in capsys.readouterr().err


def test_a_folder_that_can_not_be_written_is_noticed_before_the_work(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("mini_infer.runtime.train_draft.LLM", None)
    output = str(tmp_path / "file" / "head")
    assert main(["train-draft", "--model", str(tiny_folder), "--output", output]) == 1
    assert "Not a directory" in capsys.readouterr().err
