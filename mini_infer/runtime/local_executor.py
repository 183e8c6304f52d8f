"""The in-process executor: a ``ModelRunner`` on this process's device."""

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import OutOfMemoryError
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.model_runner import ModelRunner
from mini_infer.runtime.executor import StepHandle

ALLOCATION_FAILED = ("allocate memory", "bad_alloc", "out of memory")
"""What torch's RuntimeErrors say when an allocator refused."""


class LocalExecutor:
    """Runs each step where the scheduler runs."""

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        self._config = config
        self._runner = ModelRunner(config, files)

    def start(self) -> int:
        """Loads the model, sizes and makes the KV cache.

        Raises:
            WeightsError: the checkpoint does not fit the architecture.
            OutOfMemoryError: not even one request of ``max_model_len`` would fit.
        """
        try:
            self._runner.load()
            num_blocks = self._runner.profile_num_blocks()
            self._runner.init_cache(num_blocks)
        except (MemoryError, RuntimeError) as error:
            text = str(error)
            if text and not any(sign in text for sign in ALLOCATION_FAILED):
                raise
            raise OutOfMemoryError(
                f"the model does not fit the memory that is there ({text.partition(chr(10))[0]}): "
                "use a smaller model or dtype, or lower max_num_seqs or max_model_len"
            ) from error
        return num_blocks

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        return self._runner.execute(batch)

    def shutdown(self) -> None:
        self._runner.release()
