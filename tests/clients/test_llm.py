"""The command ``llm``, told of the server as its manual says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import MAX_TOKENS, PROMPT, QUESTION, Served


@pytest.fixture
def folder(served: Served, tmp_path: Path) -> Path:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: mine\n"
        f"  model_name: {served.model}\n"
        f'  api_base: "{served.base_url}"\n'
        f"- model_id: mine-by-completions\n"
        f"  model_name: {served.model}\n"
        f'  api_base: "{served.base_url}"\n'
        f"  completion: true\n"
    )
    return tmp_path


def llm(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LLM_USER_PATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("way", [(), ("--no-stream",)], ids=["stream", "no stream"])
def test_a_question(served: Served, folder: Path, way: tuple[str, ...]) -> None:
    options = ["-o", "temperature", "0", "-o", "max_tokens", str(MAX_TOKENS)]
    assert llm(folder, "-m", "mine", *options, *way, QUESTION).strip() == served.answer.strip()


def test_a_conversation_and_its_log(served: Served, folder: Path) -> None:
    if served.is_real:
        return  # its texts are no matter here, and every call starts a program
    options = ["-o", "temperature", "0", "-o", "max_tokens", "8"]
    llm(folder, "-m", "mine", *options, "My name is Ada.")
    llm(folder, "-c", *options, "What is my name?")
    first, second = json.loads(llm(folder, "logs", "--json", "-n", "2"))
    assert first["conversation_id"] == second["conversation_id"]
    assert all(entry["output_tokens"] for entry in (first, second))


def test_completions(folder: Path) -> None:
    options = ["-o", "temperature", "0", "-o", "max_tokens", "8"]
    assert llm(folder, "-m", "mine-by-completions", *options, PROMPT).strip()
