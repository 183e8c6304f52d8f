"""The in-process executor: a ``ModelRunner`` on this process's device."""

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.model_runner import ModelRunner
from mini_infer.runtime.executor import StepHandle


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
        self._runner.load()
        num_blocks = self._runner.profile_num_blocks()
        self._runner.init_cache(num_blocks)
        return num_blocks

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        return self._runner.execute(batch)

    def shutdown(self) -> None:
        self._runner.release()
