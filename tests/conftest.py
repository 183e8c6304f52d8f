"""Fixtures of the whole suite."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# Triton's kernels run in its interpreter where there is no GPU. It looks when it is imported, which
# other libraries do too: so before any of them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A worker of several has one core, and so has what it starts.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# A shared machine may pause at any moment: an example's time says nothing about the code.
settings.register_profile("mini-infer", deadline=None, print_blob=True)
settings.load_profile("mini-infer")

ROOT = Path(__file__).parents[1]
PROCESSES = "processes"
SHARED_SERVERS = "tests/clients/"
"""The folder whose files share dear fixtures."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest is first, so that all workers end together."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    if _group_of(item.nodeid.partition("::")[0]) in (PROCESSES, SHARED_SERVERS):
        return 0
    return 1 if item.get_closest_marker("real_model") else 2


@cache
def _group_of(file: str) -> str:
    """What one worker runs where there are several: a file, as its tests share fixtures; all files
    whose tests start processes and wait for them, so that these have a core to themselves."""
    if file.startswith(SHARED_SERVERS):
        return SHARED_SERVERS
    is_patient = "pytest.mark.processes" in (ROOT / file).read_text(encoding="utf-8")
    return PROCESSES if is_patient else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadgroup`` by these groups: xdist 3.8 puts groups of its own where pytest 9.2 does
    not look for them any more."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group_of(nodeid.partition("::")[0])

    return ByGroup(config, log)


@pytest.fixture(scope="session")
def real_model_folder() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face format; downloaded and converted the first time."""
    from mini_infer.modeling.pull import pull

    return pull("smollm2-135m")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Llama of two layers as one GGUF file, tokenizer and chat template in it."""
    from tests.modeling.gguf_files import tiny_model, write_model

    return write_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model("llama"))


@pytest.fixture(scope="session")
def tiny_folder(tiny_gguf: Path) -> Path:
    """The same model in Hugging Face format; do not change it, copy it."""
    from mini_infer.modeling.pull import pull

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINI_INFER_CACHE", str(tiny_gguf.parent / "cache"))
        return pull(str(tiny_gguf))
