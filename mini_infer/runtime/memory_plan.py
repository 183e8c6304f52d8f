"""What an engine will take on each of its devices, before a byte of its weights is read.

Sizes of weights and of the KV cache are those that the engine itself counts with. On a GPU it
measures what its largest steps and its graphs take; here, where nothing runs, that part alone is an
estimate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import MiniInferError, OutOfMemoryError
from mini_infer.core.speculative_config import MAX_SPECULATING_ROWS
from mini_infer.modeling.kv_memory import bytes_per_block, num_blocks_that_fit
from mini_infer.modeling.layers import activation_dtype
from mini_infer.modeling.memory_profile import SLACK
from mini_infer.modeling.sharding import Shard, check_divides
from mini_infer.modeling.weight_memory import GIB, HALF_DTYPES, weight_bytes
from mini_infer.modeling.weights import share_out_layers
from mini_infer.parallel.symmetric_memory import mailbox_bytes

GRAPH_BYTES = 2**30
"""Of all CUDA graphs of an engine, about; see ``docs/doctor.md``."""
LOGITS_COPIES = 6
"""Float32 tables of a step's logits that live at once where every option of sampling is on."""
COMMUNICATOR_BYTES = 2**29
"""Of NCCL's buffers on a GPU, about."""
RESIDUAL_COPIES = 4
"""Hidden states of a step's tokens that live at once: the stream, its norm, queries, their sum."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device before an engine starts on it."""

    free: int
    total: int


@dataclass(frozen=True)
class MemoryPlan:
    """What an engine of ``config`` takes. Bytes are those of one rank's device; on a CPU, whose
    memory the ranks share, those of all of them."""

    config: EngineConfig
    rank_weight_bytes: tuple[int, ...]
    draft_weight_bytes: int
    """On every rank: of a draft model or a draft head."""
    rank_block_bytes: tuple[int, ...]
    """Of a KV block's part on each rank: those of the layers of its stage."""
    step_bytes: int
    """On one rank, estimated: the largest steps, CUDA graphs, and what several ranks add up
    through. Nought on a CPU, which sets nothing aside for them."""
    num_blocks: int
    problem: str | None
    """Why the engine would not start; None where it would."""

    @property
    def kv_bytes_per_token(self) -> int:
        """On one rank, the one with most layers: over all of these, a draft model's included."""
        return max(self.rank_block_bytes) // self.config.block_size

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.config.block_size

    @property
    def longest_request(self) -> int:
        """Tokens of prompt and answer that fit; the last token is never an input."""
        return min(self.num_tokens + 1, self.config.max_model_len)

    @property
    def num_longest_requests(self) -> int:
        """Requests of ``max_model_len`` that run at once."""
        blocks_of_one = -(-(self.config.max_model_len - 1) // self.config.block_size)
        return min(self.num_blocks // blocks_of_one, self.config.max_num_seqs)

    @property
    def fits(self) -> bool:
        """It starts, and holds a request of ``max_model_len``."""
        return self.problem is None and self.num_longest_requests > 0


def plan_memory(config: EngineConfig, devices: Sequence[DeviceMemory]) -> MemoryPlan:
    """``devices`` are the GPUs of the ranks, in their order; or the CPU's memory, alone.

    Raises:
        InvalidConfigError: the model can't be cut for so many ranks or stages, or its draft head
            is no head of this model.
        ModelNotFoundError, UnsupportedModelError, WeightsError: the draft head can't be used.
    """
    check_divides(config.model_config, config.tensor_parallel_size)
    size, dtype = config.tensor_parallel_size, getattr(torch, config.dtype)
    stages = share_out_layers(config.model_config, config.pipeline_parallel_size)
    shards = [Shard(config.model_config, rank, size).config for rank in range(size)]
    parts = [(stage, shard) for stage in stages for shard in shards]
    kind = activation_dtype(torch.empty(0, dtype=dtype, device=_place(config)))
    layout = shards[0].kv_layout
    plan = MemoryPlan(
        config=config,
        rank_weight_bytes=tuple(
            weight_bytes(shard, dtype, config.device, stage) for stage, shard in parts
        ),
        draft_weight_bytes=_draft_bytes(config, dtype),
        rank_block_bytes=tuple(
            bytes_per_block(config, layout, kind, len(stage.layers)) for stage, _ in parts
        ),
        step_bytes=_step_bytes(config, dtype) if config.device == "cuda" else 0,
        num_blocks=0,
        problem=None,
    )
    try:
        if config.device == "cpu":
            return _on_cpu(plan, devices[0].free, num_blocks_that_fit(config, layout, kind))
        asked = None
        if config.num_kv_blocks is not None or config.kv_cache_memory is not None:
            most_layers = max(len(stage.layers) for stage in stages)
            asked = num_blocks_that_fit(config, layout, kind, most_layers)
        plans = [_on_gpu(plan, rank, devices[rank], asked) for rank in range(config.num_ranks)]
    except OutOfMemoryError as error:
        return replace(plan, problem=str(error))
    return min(plans, key=lambda plan: plan.num_blocks)


def first_that_fits(
    config: EngineConfig, devices: Sequence[DeviceMemory]
) -> tuple[MemoryPlan, dict[str, Any]] | None:
    """The plan nearest to ``config`` that fits ``devices``, all that there are, and the options
    that differ: first weights of half the bytes, then more GPUs, then shorter requests."""
    for changes in _changes(config, len(devices)):
        plan = _try(replace(config, **changes), devices)
        if plan is not None and plan.fits:
            return plan, {name: changes[name] for name in changes if name != BACKEND}
    for changes in _changes(config, len(devices)):
        plan = _try(replace(config, **changes), devices)
        if plan is not None and plan.problem is None and plan.longest_request > 1:
            changes["max_model_len"] = plan.longest_request
            changed = _try(replace(config, **changes), devices)
            if changed is not None and changed.fits:
                return changed, {name: changes[name] for name in changes if name != BACKEND}
    return None


def gpus_that_fit(config: EngineConfig, devices: Sequence[DeviceMemory]) -> int | None:
    """How many GPUs like the smallest of ``devices`` hold the plan; None where no number does."""
    smallest = min(devices, key=lambda device: device.free)
    most, num_stages = config.model_config.num_heads, config.pipeline_parallel_size
    for size in range(config.tensor_parallel_size + 1, most + 1):
        ranks = replace(config, tensor_parallel_size=size, distributed_executor_backend="mp")
        plan = _try(ranks, [smallest] * ranks.num_ranks)
        if plan is not None and plan.fits:
            return size * num_stages
    return None


BACKEND = "distributed_executor_backend"


def _changes(config: EngineConfig, num_devices: int) -> Iterator[dict[str, Any]]:
    """Options that take less of each device, the smallest change first."""
    sizes = [config.tensor_parallel_size]
    if config.device == "cuda":
        most = num_devices // config.pipeline_parallel_size
        sizes += range(config.tensor_parallel_size + 1, most + 1)
    dtypes: tuple[str, ...] = (config.dtype,)
    if config.dtype == "float32":
        dtypes += HALF_DTYPES[config.device]
    for size in sizes:
        for dtype in dtypes:
            changes: dict[str, Any] = {}
            if dtype != config.dtype:
                changes["dtype"] = dtype
            if size != config.tensor_parallel_size:
                changes |= {"tensor_parallel_size": size, BACKEND: "mp"}
            yield changes


def _try(config: EngineConfig, devices: Sequence[DeviceMemory]) -> MemoryPlan | None:
    try:
        return plan_memory(config, devices)
    except MiniInferError:
        return None  # so many ranks do not divide the heads


def _on_cpu(plan: MemoryPlan, free: int, num_blocks: int) -> MemoryPlan:
    weights = sum(plan.rank_weight_bytes) + plan.config.num_ranks * plan.draft_weight_bytes
    cache = num_blocks * sum(plan.rank_block_bytes)
    problem = None
    if weights > free:
        problem = f"the weights need {_gib(weights)}, {_gib(free)} are free"
    elif weights + cache > free:
        problem = (
            f"{num_blocks} KV blocks need {_gib(cache)}, and {_gib(free - weights)} are left "
            f"beside the weights: lower kv_cache_memory or num_kv_blocks"
        )
    return replace(plan, num_blocks=num_blocks, problem=problem)


def _on_gpu(plan: MemoryPlan, rank: int, device: DeviceMemory, asked: int | None) -> MemoryPlan:
    """After ``modeling.memory_profile``, with an estimate in place of what that measures."""
    config, block_bytes = plan.config, plan.rank_block_bytes[rank]
    weights = plan.rank_weight_bytes[rank] + plan.draft_weight_bytes
    if weights > device.free:
        problem = f"rank {rank}'s weights need {_gib(weights)}, {_gib(device.free)} are free"
        return replace(plan, problem=problem)
    others = device.total - device.free + weights
    limit = int(device.total * config.gpu_memory_utilization)
    if asked is not None:
        needed, left = (asked + 1) * block_bytes, device.total - others - plan.step_bytes
        too_much = (
            f"{asked} KV blocks need {_gib(needed)}, about {_gib(left)} are left beside rank "
            f"{rank}'s weights, steps and graphs: lower kv_cache_memory or num_kv_blocks"
        )
        return replace(plan, num_blocks=asked, problem=too_much if needed > left else None)
    left = limit - others - plan.step_bytes - SLACK
    demand = config.max_num_seqs * config.max_blocks_per_request
    count = min(left // block_bytes - 1, demand)
    if count >= 1:
        return replace(plan, num_blocks=count)
    nothing_left = (
        f"no memory is left for a KV cache: of {_gib(limit)} (gpu_memory_utilization "
        f"{config.gpu_memory_utilization}) {_gib(others)} are held by rank {rank}'s weights and "
        f"other programs, steps and graphs take about {_gib(plan.step_bytes)}"
    )
    return replace(plan, problem=nothing_left)


def _draft_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    speculation = config.speculative_config
    if speculation is None:
        return 0
    if speculation.model_config is not None:
        return weight_bytes(speculation.model_config, dtype, config.device)
    if speculation.method == "head":
        from mini_infer.modeling.proposers.head_files import head_bytes

        assert speculation.model is not None, "a head without one is refused"
        return head_bytes(Path(speculation.model).expanduser(), config.model_config, dtype)
    return 0


def _step_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """About what the largest step and all graphs take of a GPU, beside weights and KV cache."""
    model, speculation = config.model_config, config.speculative_config
    inner = 3 * -(
        -model.intermediate_size // config.tensor_parallel_size
    )  # gate, up, their product
    widths = inner + RESIDUAL_COPIES * model.hidden_size
    rows = min(config.max_num_seqs, config.max_step_tokens)
    if speculation is not None:
        speculating = min(MAX_SPECULATING_ROWS, rows)
        rows = max(rows, speculating * (1 + speculation.num_speculative_tokens))
    layers = config.max_step_tokens * widths * dtype.itemsize
    logits = rows * model.vocab_size * LOGITS_COPIES * torch.float32.itemsize
    tables = (config.max_num_seqs + 1) * config.max_model_len * torch.int32.itemsize
    graphs = 0 if config.enforce_eager else GRAPH_BYTES
    communicator = COMMUNICATOR_BYTES if config.num_ranks > 1 else 0
    mailboxes = 0
    if config.custom_all_reduce:
        row_bytes = model.hidden_size * dtype.itemsize
        mailboxes = mailbox_bytes(config.tensor_parallel_size, row_bytes, config.max_step_tokens)
    return max(layers, logits) + tables + graphs + communicator + mailboxes


def _place(config: EngineConfig) -> str:
    return "cpu" if config.device == "cpu" else "meta"  # no GPU is touched


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
