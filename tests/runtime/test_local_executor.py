"""The in-process executor: what it starts with, and what it refuses to start with."""

import gc
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mini_infer.core.batch import Admission, Chunk, ScheduledBatch
from mini_infer.core.errors import EngineDeadError, OutOfMemoryError, WeightsError
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.modeling import kv_memory
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.runtime.local_executor import LocalExecutor
from tests.runtime.fake_executor import TINY_MODEL, make_config
from tests.runtime.tiny_model import tiny_engine

BYTES_PER_TOKEN = 2 * TINY_MODEL.num_kv_heads * TINY_MODEL.head_dim * TINY_MODEL.num_layers * 4


def executor(weights: Path = Path("unused"), **options: Any) -> LocalExecutor:
    return LocalExecutor(make_config(**options), ModelFiles(weights, weights))


def one_step() -> ScheduledBatch:
    params = SamplingParams(temperature=0.0)
    return ScheduledBatch(
        step_id=0,
        chunks=(Chunk("a", 0, 0, 3, new_block_ids=(5,)),),
        admissions=(Admission("a", 0, (1, 2, 3), 3, params, seed=0),),
    )


def test_blocks_fill_the_memory_set_aside() -> None:
    memory = 10 * 4 * BYTES_PER_TOKEN + 1
    assert executor(num_kv_blocks=None, kv_cache_memory=memory).start() == 10


def test_a_number_of_blocks_wins_over_memory() -> None:
    assert executor(num_kv_blocks=7, kv_cache_memory=1).start() == 7


@pytest.mark.parametrize(("num_blocks", "longest"), [(2, 9), (3, 13), (4, None)])
def test_a_cache_below_max_model_len_says_how_long_a_request_may_be(
    num_blocks: int, longest: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    executor(num_kv_blocks=num_blocks, block_size=4, max_model_len=17).start()
    assert (f"may have {longest} tokens" in caplog.text) if longest else not caplog.text


def test_a_step_samples_a_token() -> None:
    running = executor()
    running.start()
    result = running.submit(one_step()).result()
    ((token_id,),) = result.token_ids
    assert 0 <= token_id < TINY_MODEL.vocab_size


def test_memory_for_less_than_a_block_says_how_much_one_takes() -> None:
    with pytest.raises(OutOfMemoryError, match=f"one takes {4 * BYTES_PER_TOKEN} bytes"):
        executor(num_kv_blocks=None, kv_cache_memory=100).start()


def test_weights_beyond_the_free_memory_say_both(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    with pytest.raises(OutOfMemoryError, match=r"weights of tiny need .* GiB in float32, .* free"):
        executor().start()


def test_a_cache_that_can_not_be_allocated_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    starting = executor()
    starting._runner.load()
    monkeypatch.setattr(kv_memory.torch, "zeros", fail)
    monkeypatch.setattr(starting._runner, "load", lambda: None)
    with pytest.raises(OutOfMemoryError, match="lower kv_cache_memory"):
        starting.start()


@pytest.mark.parametrize(
    ("message", "is_memory"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_only_a_refusal_of_memory_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch, message: str, is_memory: bool
) -> None:
    def fail() -> None:
        raise RuntimeError(f"{message}\nand a stack")

    starting = executor()
    monkeypatch.setattr(starting._runner, "capture_graphs", fail)
    with pytest.raises(OutOfMemoryError if is_memory else RuntimeError) as raised:
        starting.start()
    assert message in str(raised.value)
    assert ("max_num_batched_tokens" in str(raised.value)) is is_memory


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds no \*\.safetensors"):
        executor(tmp_path, load_format="safetensors").start()


def test_shutdown_frees_weights_and_cache_and_may_come_twice() -> None:
    running = executor()
    running.start()
    model = weakref.ref(running._runner.model)
    cache = weakref.ref(running._runner.caches[0][0])
    running.shutdown()
    gc.collect()
    assert model() is None
    assert cache() is None
    running.shutdown()


def test_shutdown_before_start_is_harmless() -> None:
    executor().shutdown()


def test_a_device_that_failed_ends_the_engine_and_not_one_request_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after an illegal access, from which no process recovers."""
    engine = tiny_engine()

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access\nCompile with ...")

    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4))
    monkeypatch.setattr(engine.core.executor._runner, "_forward", fail)  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"illegal memory access\): restart"):
            engine.step()
