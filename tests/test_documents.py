"""The documents keep their word: links lead somewhere, both READMEs agree, and examples run."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from mini_infer.cli.load.command import serve as bench_serve
from mini_infer.cli.main import cli
from mini_infer.cli.serve import serve
from mini_infer.core.engine_config import DEFAULT_MODEL, engine_options

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SERVER = "http://localhost:8000"
FENCE = re.compile(
    r"^(?:<!-- not run in tests: (?P<reason>[^\n]+) -->\n)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"(?:^|[|&;] *)(?:mini-infer|make)\b")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: str
    line: int
    language: str
    text: str
    reason: str
    """Why it is not run; nothing where it is."""

    @property
    def runs(self) -> bool:
        """The Chinese README's blocks are the English one's, which another test makes sure of."""
        return not self.reason and self.document != "README.zh-CN.md"

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    return [
        Block(
            name,
            source.count("\n", 0, match.start("text")),
            match["language"],
            match["text"],
            match["reason"] or "",
        )
        for match in FENCE.finditer(source)
    ]


def blocks(*languages: str) -> list[Block]:
    found = [block for path in DOCUMENTS for block in blocks_of(path)]
    return [block for block in found if block.language in languages]


def anchors_of(path: Path) -> set[str]:
    """The anchors that headings get, by GitHub's rule."""
    prose = FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands_of(text: str) -> list[list[str]]:
    """Every call of mini-infer and make in a shell block, as a list of arguments."""
    joined = text.replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        if not COMMAND.search(line):
            continue
        words = shlex.split(line, comments=True)
        for index, word in enumerate(words):
            starts = index == 0 or words[index - 1] in ("|", "&&", ";")
            if starts and word in ("mini-infer", "mini-infer-serve", "make"):
                rest = words[index:]
                ends = [rest.index(mark) for mark in ("|", "&&", ";", "&", ">") if mark in rest]
                found.append(rest[: min(ends, default=len(rest))])
    return found


def test_readmes_have_the_same_code() -> None:
    english, chinese = (blocks_of(ROOT / name) for name in ("README.md", "README.zh-CN.md"))
    assert [(block.language, block.text, block.reason) for block in english] == [
        (block.language, block.text, block.reason) for block in chinese
    ]


def test_readmes_have_the_same_structure_and_links() -> None:
    sources = [(ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md")]
    levels = [re.findall(r"^(#+) ", FENCE.sub("", source), re.MULTILINE) for source in sources]
    assert levels[0] == levels[1]
    links = [
        sorted(set(LINK.findall(source)) - {"README.md", "README.zh-CN.md"}) for source in sources
    ]
    assert links[0] == links[1]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    prose = FENCE.sub("", path.read_text(encoding="utf-8"))
    for target in LINK.findall(prose):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name) if name else path
        assert linked.exists(), f"{path.name} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors_of(linked), f"{path.name}: {target} has no such heading"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_options_in_prose_exist(path: Path) -> None:
    """`--some-option` of a document is one of the commands' or tools' that it speaks of."""
    known = {"--help", "--output", "--runs"}
    context = click.Context(cli)
    for command in (cli.get_command(context, name) for name in cli.list_commands(context)):
        assert command is not None
        for parameter in [*command.params, *bench_serve.params]:
            known |= {*parameter.opts, *parameter.secondary_opts}
    prose = FENCE.sub("", path.read_text(encoding="utf-8"))
    mentioned = set(re.findall(r"`(--[a-z][a-z-]+)", prose))
    assert mentioned <= known


def test_every_shell_block_is_marked_as_bash() -> None:
    assert blocks("sh", "shell", "console", "zsh") == []


@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_shell_block_is_valid(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_commands_of_a_shell_block_exist(block: Block) -> None:
    """Targets are in the Makefile; options are the commands' own, with values they accept."""
    makefile = (ROOT / "Makefile").read_text()
    for name, *arguments in commands_of(block.text):
        if name == "make":
            for word in arguments:
                assert "=" in word or re.search(rf"^{word}:", makefile, re.MULTILINE), word
        elif name == "mini-infer-serve":
            serve.make_context(name, list(arguments))
        else:
            command = cli.get_command(click.Context(cli), arguments[0])
            assert command is not None, f"{block}: no command {arguments[0]}"
            if isinstance(command, click.Group) and len(arguments) > 1:
                group, (_, *arguments) = command, arguments
                command = group.get_command(click.Context(group), arguments[0])
                assert command is not None, f"{block}: no command {arguments[0]}"
            command.make_context(name, arguments[1:])


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """A dry run of the real server, under the name that the examples ask for."""
    program = "from mini_infer.cli.main import serve_main; serve_main()"
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            program,
            "--dry-run",
            "--port",
            "0",
            "--served-model-name",
            DEFAULT_MODEL,
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def commands_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH whose ``mini-infer`` adds --dry-run to what would load a model."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "mini-infer"
    script.write_text(
        f"#!/bin/sh\ncommand=$1\nshift\n"
        f'case "$command" in generate|chat) set -- --dry-run "$@" ;; esac\n'
        f"PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} -c "
        f'"import sys; from mini_infer.cli.main import main; sys.exit(main())" "$command" "$@"\n'
    )
    script.chmod(0o755)
    return folder


def runnable(block: Block) -> bool:
    """Blocks with curl run where curl is; everywhere else they are still checked as above."""
    return block.runs and ("curl" not in block.text or shutil.which("curl") is not None)


@pytest.mark.parametrize("block", [block for block in blocks("bash") if runnable(block)], ids=str)
def test_shell_block_runs(
    block: Block, server_url: str, commands_folder: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail"],
        input=block.text.replace(SERVER, server_url),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        env={**os.environ, "PATH": f"{commands_folder}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stderr
    assert '"error":{' not in done.stdout


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_block_is_valid(block: Block) -> None:
    ast.parse(block.text)


def uses_the_public_api(block: Block) -> bool:
    return block.runs and bool(re.search(r"^from (openai|mini_infer) import", block.text, re.M))


@pytest.mark.parametrize(
    "block", [block for block in blocks("python") if uses_the_public_api(block)], ids=str
)
def test_python_block_runs(block: Block, server_url: str, tmp_path: Path) -> None:
    """Against the dry run: ``LLM`` gets one more option, clients the address of a live server."""
    prelude = (
        "import functools, mini_infer\n"
        "mini_infer.LLM = functools.partial(mini_infer.LLM, dry_run=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", prelude + block.text.replace(SERVER, server_url)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_readme_tells_how_to_switch_each_mechanism_off() -> None:
    source = (ROOT / "README.md").read_text()
    switches = ("chunked-prefill", "prefix-caching", "dry-run", "depth", "max-num-seqs")
    assert all(f"enable_{name}".replace("-", "_") in engine_options() for name in switches[:2])
    for name in switches:
        assert re.search(rf"`--(no-)?{name}`", source), name


CODE = re.compile(r"`((?:[\w.-]+/)*\w+\.py)(?:::([\w.]+))?`")

NOT_THERE = ("file.py", "mini_infer/modeling/models/olmo2.py")
"""A pattern, and the file that whoever follows docs/adding-a-model.md writes."""


def mentions_of_code() -> list[tuple[str, str, str]]:
    """(document, file, name within it or nothing) of everything written as `file.py::name`."""
    found = {
        (path.relative_to(ROOT).as_posix(), match[1], match[2] or "")
        for path in DOCUMENTS
        for match in CODE.finditer(FENCE.sub("", path.read_text(encoding="utf-8")))
    }
    return sorted(mention for mention in found if mention[1] not in NOT_THERE)


def names_in(path: Path) -> set[str]:
    """Functions, classes and variables of a module, and their members as ``Class.member``."""

    def names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + node.name
            elif isinstance(node, ast.ClassDef):
                yield prefix + node.name
                yield from names(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (
                    prefix + target.id for target in targets if isinstance(target, ast.Name)
                )

    return set(names(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def test_documents_mention_code() -> None:
    assert len(mentions_of_code()) > 50


@pytest.mark.parametrize(
    ("document", "file", "name"), mentions_of_code(), ids=lambda value: value or "file"
)
def test_code_that_a_document_mentions_exists(document: str, file: str, name: str) -> None:
    """A file may be named by its last parts, if no name stands in two of that ending."""
    files = [
        path
        for folder in ("mini_infer", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if path.as_posix().endswith(f"/{file}")
    ]
    assert files, f"{document} mentions {file}, which is not there"
    if name:
        holders = [path for path in files if name in names_in(path)]
        assert len(holders) == 1, f"{document}: {file}::{name} is in {len(holders)} files"
