"""Weights are in memory once, also while they are loaded: counted in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_model

ROOT = Path(__file__).parents[1]
# VmHWM is the high-water mark of all resident memory. It counts the checkpoint's memory-mapped
# pages too, of which the source keeps one tensor's at a time. RssAnon leaves those out: it is what
# the process itself wrote.
PROGRAM = """
import json, sys
import torch
from mini_infer.modeling.load import load_model
from mini_infer.modeling.weight_memory import weight_bytes
from mini_infer.modeling.model_files import locate_model
from mini_infer.runtime.resolve import resolve_engine

def memory(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))

config, _, _ = resolve_engine({"model": sys.argv[1], "dtype": sys.argv[2]})
files = locate_model(sys.argv[1])
before, before_anonymous = memory("VmRSS"), memory("RssAnon")
model = load_model(config, files)
dtype = getattr(torch, config.dtype)
print(json.dumps({
    "foretold": weight_bytes(config.model_config, dtype, config.device),
    "peak": memory("VmHWM") - before,
    "kept": memory("RssAnon") - before_anonymous,
    "compiler": "sympy" in sys.modules,
}))
"""
LAYERS, HIDDEN, INNER, QKV, VOCABULARY = 30, 576, 1536, 960, 49152
FBGEMM_INPUTS = 512
"""fbgemm's packed float16 layout pads a matrix's inputs to a multiple of this."""


def packed_bytes(dtype: str) -> int:
    """Bytes of the packed matrices and the embedding's table."""
    size, unit = (2, FBGEMM_INPUTS) if dtype == "float16" else (4, 1)

    def matrix(inputs: int, outputs: int) -> int:
        return -(-inputs // unit) * unit * outputs * size

    layer = (
        matrix(HIDDEN, QKV)
        + matrix(HIDDEN, HIDDEN)
        + matrix(HIDDEN, 2 * INNER)
        + matrix(INNER, HIDDEN)
    )
    return LAYERS * layer + matrix(HIDDEN, VOCABULARY) + VOCABULARY * HIDDEN * size


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_weights_are_in_memory_once(dtype: str, real_model_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(real_model_folder), dtype],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    measured = json.loads(done.stdout)
    final = packed_bytes(dtype)
    assert measured["peak"] < 1.3 * final, (
        f"peak of {measured['peak'] / final:.2f} times the weights"
    )
    assert measured["kept"] < 1.15 * final, (
        f"{measured['kept'] / final:.2f} times the weights remain"
    )
    assert measured["foretold"] == pytest.approx(final, rel=0.01)
    assert not measured["compiler"], "loading imported torch's compiler: 50 MB and a second"
