"""schemathesis sends what the OpenAPI document allows, and what it does not, to a dry run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.live import LiveServer

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
"""Not that all data of the right form is accepted: an empty prompt has it, too."""


def test_no_fault_and_no_undocumented_answer(server: LiveServer, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    program = "from schemathesis.cli import schemathesis; schemathesis()"
    arguments = ["run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS)]
    arguments += ["--max-examples", "10", "--generation-deterministic", "--no-color"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    cases = re.search(r"(\d+) generated", done.stdout)
    assert cases is not None
    print(f"{cases[1]} cases")
    assert int(cases[1]) > 500
    server.wait_until_idle()
