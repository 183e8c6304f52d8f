"""The in-process executor: a ``ModelRunner`` on this process's device."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import OutOfMemoryError
from mini_infer.core.step_costs import StepCosts
from mini_infer.modeling.kernel_warm_up import compile_kernels
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.model_runner import ModelRunner
from mini_infer.modeling.step_cost_profile import measure_step_costs
from mini_infer.runtime.executor import StepHandle

logger = logging.getLogger(__name__)

ALLOCATION_FAILED = ("allocate memory", "bad_alloc", "out of memory", "ALLOC_FAILED")
"""What torch's RuntimeErrors say when an allocator refused, the last one cuBLAS's."""


class LocalExecutor:
    """Runs each step where the scheduler runs."""

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        self._config = config
        self._runner = ModelRunner(config, files)

    def start(self) -> int:
        """Loads the model, sizes and makes the KV cache; warns when ``max_model_len`` exceeds it.

        Raises:
            WeightsError: the checkpoint does not fit the architecture.
            OutOfMemoryError: weights or KV cache do not fit the memory.
        """
        with allocation_failures():
            self._runner.load()
            compile_kernels(self._runner)
            num_blocks = self._runner.profile_num_blocks()
            self._runner.init_cache(num_blocks)
            self._runner.capture_graphs()
        warn_if_short(self._config, num_blocks)
        return num_blocks

    def step_costs(self) -> StepCosts | None:
        """See ``Executor.step_costs``."""
        return measure_step_costs(self._runner)

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        return self._runner.execute(batch)

    def shutdown(self) -> None:
        self._runner.release()


@contextmanager
def allocation_failures() -> Iterator[None]:
    """Around what takes memory at a start.

    Raises:
        OutOfMemoryError: in place of what an allocator raises.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if text and not any(sign in text for sign in ALLOCATION_FAILED):
            raise
        raise OutOfMemoryError(
            f"the model does not fit the memory that is there ({text.partition(chr(10))[0]}): "
            "use a smaller model or dtype, or lower max_num_seqs, max_model_len, "
            "max_num_batched_tokens, or what you gave the KV cache"
        ) from error


def warn_if_short(config: EngineConfig, num_blocks: int) -> None:
    """Says so where the KV cache does not hold the longest request."""
    longest = num_blocks * config.block_size + 1  # the last token is never an input
    if longest < config.max_model_len:
        logger.warning(
            "the KV cache holds less than max_model_len %d: prompt and answer together may "
            "have %d tokens; raise kv_cache_memory (gpu_memory_utilization on a GPU)",
            config.max_model_len,
            longest,
        )
