"""Weights on a GPU: streamed bit for bit, in little host memory; kernels compiled ahead."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from safetensors.torch import save_file
from torch import Tensor

from mini_infer.kernels.triton.compile_ahead import compile_ahead
from mini_infer.modeling.dummy_source import DummySource
from mini_infer.modeling.safetensors_source import SafetensorsSource
from mini_infer.modeling.weight_stream import Staging, stream_tensors
from mini_infer.modeling.weights import build_model, checkpoint_places, empty_model
from tests.modeling.fakes import random_tensors, tiny_config, write_shards

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda")
STORED = [torch.float32, torch.bfloat16, torch.float16]
HOST_LIMIT = 512 << 20
"""Bytes that loading may take of the host's memory beside what the process had before."""
CHECKPOINT_BYTES = 3 << 29
PROGRAM = """
import json, sys
from pathlib import Path
import torch
from mini_infer.modeling.safetensors_source import SafetensorsSource

def memory(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))

source = SafetensorsSource(Path(sys.argv[1]))
places = {
    name: torch.empty(source.shape(name), dtype=torch.bfloat16, device="cuda")
    for name in source.names()
}
torch.cuda.synchronize()
before = memory("VmRSS")
for _ in source.load_into(places):
    pass
torch.cuda.synchronize()
print(json.dumps(memory("VmHWM") - before))
"""


def poisoned(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: torch.full(tensor.shape, torch.nan, dtype=dtype, device=DEVICE)
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("wanted", STORED, ids=str)
@pytest.mark.parametrize("buffer_bytes", [4096 + 4, 1 << 20])
def test_streamed_tensors_are_those_of_the_file(
    tmp_path: Path, wanted: torch.dtype, buffer_bytes: int
) -> None:
    """Buffers are used many times over, so one that is refilled too early shows."""
    shapes = [(513, 1024), (1,), (3, 5), (2048, 768), (7,), (1024, 1024)]
    tensors = {f"t{i}": torch.randn(shape).to(STORED[i % 3]) for i, shape in enumerate(shapes)}
    write_shards(tmp_path, tensors, 2)
    source = SafetensorsSource(tmp_path)
    places = poisoned(tensors, wanted)
    kept = dict(places)
    order = [source._tensors[name] for name in source.names()]
    assert len(list(stream_tensors(order, places, Staging(buffer_bytes, 3, 2)))) == len(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(kept[name].cpu(), tensor.to(wanted))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_built_from_shards(tmp_path: Path, tied: bool) -> None:
    config = tiny_config("Qwen2ForCausalLM", tie_word_embeddings=tied)
    tensors = random_tensors(config)
    write_shards(tmp_path, tensors, 3)
    model = build_model(config, SafetensorsSource(tmp_path), torch.bfloat16, DEVICE)
    for name, place in checkpoint_places(model).items():
        assert torch.equal(place.cpu(), tensors[name].bfloat16())


def test_host_memory_stays_far_below_the_checkpoint(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.ones(1 << 27, dtype=torch.bfloat16) for i in range(2)}
    for shard in range(CHECKPOINT_BYTES // (1 << 29)):
        part = {f"{shard}.{name}": tensor for name, tensor in tensors.items()}
        save_file(part, tmp_path / f"{shard}.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert json.loads(done.stdout) < HOST_LIMIT


def test_random_weights_in_place_are_those_of_a_tensor_by_itself() -> None:
    config = tiny_config("Qwen3ForCausalLM")
    source = DummySource(config, 5, torch.bfloat16, DEVICE)
    places = checkpoint_places(empty_model(config, torch.bfloat16, DEVICE))
    kept = dict(places)
    list(source.load_into(places))
    assert all(torch.equal(place, source.get(name)) for name, place in kept.items())


@triton.jit
def store_kernel(out, value: tl.constexpr):
    tl.static_assert(value > 0)
    tl.store(out + tl.arange(0, 16), value)


def test_a_kernel_that_is_compiled_ahead_does_not_run_until_it_is_launched() -> None:
    out = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    with compile_ahead():
        for value in (3, 4, 3):
            store_kernel[(1,)](out, value)
        assert not torch.empty(1 << 16, device=DEVICE).any()
    compiled = dict(store_kernel.device_caches[0][0])
    assert len(compiled) == 2
    assert not out.any()
    for value in (3, 4):
        store_kernel[(1,)](out, value)
        assert (out == value).all()
    assert store_kernel.device_caches[0][0].keys() == compiled.keys()


def test_a_kernel_that_does_not_compile_says_so_when_it_is_launched() -> None:
    out = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    with compile_ahead():
        store_kernel[(1,)](out, -1)
    with pytest.raises(triton.CompilationError):
        store_kernel[(1,)](out, -1)
