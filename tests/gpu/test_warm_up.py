"""On a GPU: what steps launch was compiled before the first of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import triton

from mini_infer import SamplingParams
from tests.gpu.small_engines import ARCHITECTURES, open_llm, write_config

NUM_ROWS = 160
"""Decoding rows beside chunks come by every number up to it: attention splits few of them otherwise
than many."""


@contextmanager
def compiled_kernels() -> Iterator[list[str]]:
    """Names of the kernels that are compiled within."""
    names: list[str] = []

    def note(*, fn: Any, **_: Any) -> None:
        names.append(fn.name)

    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before


@pytest.mark.parametrize("speculation", [None, {"method": "ngram", "num_speculative_tokens": 4}])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_is_compiled_while_requests_wait(
    architecture: str, speculation: dict[str, Any] | None, tmp_path: Path
) -> None:
    options = {"max_num_seqs": 256, "num_kv_blocks": 4000, "max_num_batched_tokens": 1024}
    folder = write_config(tmp_path, architecture)
    with open_llm(folder, speculative_config=speculation, **options) as llm:
        prompts = [[1 + row % 7] * (20 + 5 * (row % 40)) for row in range(NUM_ROWS)]
        params = [
            SamplingParams(temperature=0.6, max_tokens=40 + row % 30, ignore_eos=True)
            for row in range(NUM_ROWS)
        ]
        with compiled_kernels() as names:
            llm.generate(prompts, params, use_tqdm=False)
    assert names == []
