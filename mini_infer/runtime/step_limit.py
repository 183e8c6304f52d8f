"""How long a step, or a layer of one, may take before its engine is taken for hung."""

from collections.abc import Sequence

from mini_infer.core.batch import Chunk, ScheduledBatch
from mini_infer.core.engine_config import EngineConfig

STEP_SECONDS = 8.0
"""Of a step with next to no work. A loaded machine takes a fraction of a second."""
SLOWEST_CPU = 1e9
"""Floating-point operations a second that any processor does, beside whatever else it has to do: a
hundredth of what two cores of a server do in float32."""
SLOWEST_GPU = 1e12
"""The same of a GPU: a hundredth of a data centre's."""
RANKS_SECONDS = 60.0
"""Added where ranks run the step. Who hangs among them is found sooner by those who watch them."""


def step_limit(config: EngineConfig, batches: Sequence[ScheduledBatch]) -> float:
    """Seconds that the steps ``batches``, together, may take on the slowest machine there is."""
    work = sum(_operations(config, batch) for batch in batches)
    has_ranks = config.distributed_executor_backend != "local"
    return STEP_SECONDS + work / _speed(config) + has_ranks * RANKS_SECONDS


def layer_limit(config: EngineConfig) -> float:
    """The same of a layer of the largest step."""
    whole = Chunk("", 0, 0, config.max_step_tokens)
    most = _operations(config, ScheduledBatch(0, (whole,)))
    return most / config.model_config.num_layers / _speed(config)


def _speed(config: EngineConfig) -> float:
    return SLOWEST_CPU if config.device == "cpu" else SLOWEST_GPU


def _operations(config: EngineConfig, batch: ScheduledBatch) -> float:
    """Two for each weight and token, and four for each query's and key's element."""
    model = config.model_config
    queries = model.num_heads * model.head_dim
    attention = 2 * model.hidden_size * (queries + model.num_kv_heads * model.head_dim)
    mlp = 3 * model.hidden_size * model.intermediate_size
    weights = model.num_layers * (attention + mlp) + model.vocab_size * model.hidden_size
    total = 0.0
    for chunk in batch.chunks:
        context = chunk.num_computed_tokens + chunk.num_new_tokens
        total += chunk.num_new_tokens * (2.0 * weights + 4.0 * model.num_layers * queries * context)
    return total
