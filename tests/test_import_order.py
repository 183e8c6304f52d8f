"""The rooms of the package, and who may enter which: read from the syntax trees, then run."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mini_infer"
LEVELS = {
    "core": 0,
    "kernels": 1,
    "parallel": 1,
    "cache": 1,
    "modeling": 2,
    "runtime": 3,
    "serving": 4,
    "cli": 5,
}
HEAVY = ("torch", "transformers", "numpy")


def imported_modules(source: str, package: str) -> list[str]:
    """Every module that the source imports anywhere: in functions and under TYPE_CHECKING too.

    ``from mini_infer import runtime`` counts as ``mini_infer.runtime``; a relative import is
    resolved against ``package``; so is the literal argument of ``import_module`` or ``__import__``.
    """
    modules: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            modules += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                modules.append(node.args[0].value)
    return modules


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "mini_infer" and len(parts) > 1 and parts[1] in LEVELS else None


def forbidden_imports(source: str, package: str) -> list[str]:
    here = room_of(package)
    assert here is not None
    rooms = {room_of(module) for module in imported_modules(source, package)} - {None, here}
    return sorted(room for room in rooms if room and LEVELS[room] >= LEVELS[here])


def python_files() -> list[Path]:
    return sorted(path for room in LEVELS for path in (PACKAGE / room).rglob("*.py"))


@pytest.mark.parametrize("path", python_files(), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_go_from_right_to_left(path: Path) -> None:
    package = ".".join(("mini_infer", *path.relative_to(PACKAGE).parent.parts))
    assert forbidden_imports(path.read_text(), package) == []


def test_every_folder_is_a_known_room() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(LEVELS)


@pytest.mark.parametrize(
    ("package", "source", "expected"),
    [
        ("mini_infer.core", "import mini_infer.cache.manager", ["cache"]),
        ("mini_infer.cache", "def f():\n    from mini_infer.kernels import x", ["kernels"]),
        ("mini_infer.runtime", "if TYPE_CHECKING:\n    import mini_infer.serving.app", ["serving"]),
        ("mini_infer.modeling.models", "from ...runtime import engine", ["runtime"]),
        ("mini_infer.modeling", "from mini_infer import cli", ["cli"]),
        ("mini_infer.core", "importlib.import_module('mini_infer.cli.main')", ["cli"]),
        ("mini_infer.serving", "from mini_infer.runtime import a\nimport mini_infer.core.b", []),
        ("mini_infer.modeling.models", "from ..layers import norm\nfrom . import llama", []),
    ],
)
def test_the_checker_sees_each_kind_of_import(
    package: str, source: str, expected: list[str]
) -> None:
    assert forbidden_imports(source, package) == expected


RAY_SERVE = "mini_infer.serving.ray_serve"
"""Imported by Ray's processes only. Ray itself brings numpy."""


def imports_of(modules: list[str]) -> str:
    return "\n".join(f"import {module}" for module in modules)


def modules_under(room: str) -> list[str]:
    return [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((PACKAGE / room).rglob("*.py"))
    ]


@pytest.mark.parametrize(
    "modules",
    [
        modules_under("core") + modules_under("cache"),
        [module for module in modules_under("serving") if module != RAY_SERVE],
        modules_under("cli"),
        [
            "mini_infer",
            "mini_infer.runtime.scheduler",
            "mini_infer.runtime.engine",
            "mini_infer.runtime.dry_run",
        ],
    ],
    ids=["core and cache", "serving", "cli", "scheduler, engine and dry run"],
)
def test_light_rooms_import_nothing_heavy(modules: list[str]) -> None:
    program = f"{imports_of(modules)}\nimport sys\nprint([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_dry_run_answers_without_anything_heavy() -> None:
    program = f"""
        import sys
        from mini_infer import LLM, SamplingParams
        outputs = LLM(dry_run=True).generate(["Hello"], SamplingParams(max_tokens=4))
        assert outputs[0].outputs[0].token_ids
        print([m for m in {HEAVY} if m in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
