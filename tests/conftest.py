"""Fixtures of the whole suite."""

import os
from pathlib import Path

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

SHARED_SERVERS = "tests/clients/"
"""The folder whose files share dear fixtures."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Says what one worker runs where there are several (``-n 2 --dist loadgroup``): a file, as its
    tests share fixtures; all files whose tests start processes and wait for them, so that these
    have a core to themselves. What takes longest is first, so that all workers end together."""
    for item in items:
        file = item.nodeid.partition("::")[0]
        if item.get_closest_marker("processes"):
            group = "processes"
        else:
            group = SHARED_SERVERS if file.startswith(SHARED_SERVERS) else file
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    group = item.get_closest_marker("xdist_group")
    assert group is not None
    if group.args[0] in ("processes", SHARED_SERVERS):
        return 0
    return 1 if item.get_closest_marker("real_model") else 2


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
