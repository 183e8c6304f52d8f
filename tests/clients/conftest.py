"""Real clients against a live server, of the dry run and of the small model.

The server is started as a user starts it. A file is left out, and the head of the run says so,
where what it drives is not installed: the clients are the extra ``clients``; Node, npm, curl and
Chromium come with the system.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
COMMAND = "import sys; from mini_infer.cli.main import main; sys.exit(main())"
QUESTION = "What is the capital of France?"
PROMPT = "The capital of France is"
"""For plain completions: an instructed model takes a whole question for the end."""
MAX_TOKENS = 500
"""More than any answer to it has: some helpers raise where one is cut off."""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

NEEDS = {
    "test_litellm.py": ("litellm",),
    "test_langchain.py": ("langchain_openai",),
    "test_llm.py": ("llm",),
    "test_lm_eval.py": ("lm_eval",),
    "test_chat_page.py": ("playwright", "chromium"),
    "test_openai_node.py": ("node", "npm"),
    "test_curl.py": ("curl",),
}
"""By file: packages to import, or programs to run."""
PROGRAMS = {"node", "npm", "curl"}


def is_there(name: str) -> bool:
    if name == "chromium":
        return CHROMIUM is not None
    return (shutil.which(name) if name in PROGRAMS else find_spec(name)) is not None


MISSING = {
    file: [name for name in names if not is_there(name)]
    for file, names in NEEDS.items()
    if not all(map(is_there, names))
}
collect_ignore = list(MISSING)


def pytest_report_header() -> list[str]:
    return [f"clients: {file} is left out without {', '.join(MISSING[file])}" for file in MISSING]


@dataclass(frozen=True, slots=True)
class Served:
    """A server, its model's name, and what it answers to ``QUESTION``, as plain HTTP shows it."""

    url: str
    model: str
    is_real: bool
    answer: str
    """Greedily, to its end."""

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


def ask(url: str, **fields: Any) -> str:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        **fields,
    }
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=180)
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


@contextmanager
def started(*options: str) -> Iterator[str]:
    """The address of a server with these options."""
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", *options, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            assert process.wait(30) == 0


@pytest.fixture(
    scope="session",
    params=["dry run", pytest.param("real model", marks=pytest.mark.real_model)],
)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    is_real = request.param == "real model"
    options = ["--dry-run", "--served-model-name", "dry-run"]
    if is_real:
        folder = request.getfixturevalue("real_model_folder")
        options = ["--model", str(folder), "--served-model-name", "smollm2-135m"]
        options += ["--max-model-len", "1024"]
    with started(*options) as url:
        yield Served(url, "smollm2-135m" if is_real else "dry-run", is_real, ask(url))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client asks the network, or takes a key that the developer has for another server."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
