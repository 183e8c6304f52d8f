"""OpenAI's client for Node, installed from the lock file once."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import MAX_TOKENS, QUESTION, Served

FOLDER = Path(__file__).parent / "node"


@pytest.fixture(scope="session")
def package() -> None:
    """npm writes the second file last; it is older than the lock after a change of that."""
    lock, installed = FOLDER / "package-lock.json", FOLDER / "node_modules" / ".package-lock.json"
    if installed.exists() and installed.stat().st_mtime >= lock.stat().st_mtime:
        return
    done = subprocess.run(
        ["npm", "ci", "--no-audit", "--no-fund"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("package")
def test_the_client_for_node(served: Served) -> None:
    variables = {"BASE_URL": served.base_url, "MODEL": served.model, "QUESTION": QUESTION}
    variables["MAX_TOKENS"] = str(MAX_TOKENS)
    done = subprocess.run(
        ["node", str(FOLDER / "check.mjs")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for way in ("answer", "streamed", "helper", "response"):
        assert found[way] == served.answer, way
    assert found["deltas"] > 3
    assert found["usage"] == found["usageOfAnswer"]
    assert found["left"] == "assistant"
    assert found["error"] == {"kind": "NotFoundError", "status": 404, "code": "model_not_found"}
    assert found["models"] == [served.model]
