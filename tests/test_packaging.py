"""pyproject.toml, constraints.txt, Makefile and the continuous integration agree."""

import ast
import itertools
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mini_infer
from mini_infer.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [*PROJECT["dependencies"], *EXTRAS["serve"], *EXTRAS["dev"], *EXTRAS["clients"]]

BROUGHT_ALONG = {
    "starlette": "fastapi",
    "pydantic": "fastapi",
    "anyio": "fastapi",
    "triton": "torch",
    "opentelemetry": "opentelemetry-sdk",
    "langchain_core": "langchain-openai",
    "xdist": "pytest-xdist",
    "zmq": "pyzmq",
}
"""Packages that are part of how another one is used, by their name in an import."""


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.parametrize("text", REQUIREMENTS)
def test_every_requirement_has_a_tested_version_that_it_allows(text: str) -> None:
    requirement = Requirement(text)
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_what_is_imported_is_required() -> None:
    """The package imports what it or an extra for users requires; tests may use ``dev`` as well."""
    extras = (EXTRAS[name] for name in ("serve", "ray", "otel", "bench"))
    for_users = [*PROJECT["dependencies"], *itertools.chain.from_iterable(extras)]
    ours = {"mini_infer", "tests", *(path.stem for path in (ROOT / "benchmarks").glob("*.py"))}
    for folder, requirements in (
        ("mini_infer", for_users),
        ("tests", REQUIREMENTS),
        ("benchmarks", REQUIREMENTS),
    ):
        required = {canonicalize_name(Requirement(text).name) for text in requirements}
        for path in (ROOT / folder).rglob("*.py"):
            others = imported_names(path) - sys.stdlib_module_names - ours
            packages = {canonicalize_name(BROUGHT_ALONG.get(name, name)) for name in others}
            assert packages <= required, path


def imported_names(path: Path) -> set[str]:
    """First parts of all that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_pins_are_exact_and_without_local_builds() -> None:
    assert all(re.fullmatch(r"[\w.]+", version) for version in pins().values())


@pytest.mark.parametrize("target", ["serve", "chat", "test", "lint", "bench", "coverage"])
def test_makefile_has_the_target_with_its_help(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:.*## \w", makefile, re.MULTILINE)
    assert re.search(rf"^\.PHONY:.*\b{target}\b", makefile, re.MULTILINE)


def test_continuous_integration_runs_lint_and_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make lint\nmake test\n" in script.read_text()
    assert "- run: .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_package_is_typed_and_versions_agree() -> None:
    assert (ROOT / "mini_infer" / "py.typed").exists()
    assert PROJECT["version"] == mini_infer.__version__
    assert f"## {mini_infer.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_scripts_are_the_command_line() -> None:
    assert PROJECT["scripts"] == {
        "mini-infer": "mini_infer.cli.main:main",
        "mini-infer-serve": "mini_infer.cli.main:serve_main",
    }
    assert {"serve", "chat", "generate", "bench", "pull", "train-draft", "doctor"} == set(COMMANDS)
