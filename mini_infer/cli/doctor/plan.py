"""Would this engine start here, and how much would it hold? From ``config.json`` alone."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidConfigError, MiniInferError

if TYPE_CHECKING:
    from mini_infer.runtime.memory_plan import DeviceMemory, MemoryPlan


def examine(options: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of an engine with ``options``, numbers only, and what would fit where it does not.

    Its ``problem`` is None where the engine would start; ``fits`` tells whether it then holds a
    request of ``max_model_len``, too.

    Raises:
        MiniInferError: the model can't be used, whatever the memory.
    """
    from mini_infer.runtime.memory_plan import first_that_fits, gpus_that_fit, plan_memory

    try:
        config = _resolve(options)
    except InvalidConfigError as error:
        return {"problem": str(error), "fits": False, "suggestion": _smaller_tp(options)}
    devices = _devices(config)
    plan = plan_memory(config, devices)
    answer = _numbers(plan, devices)
    if plan.fits:
        return answer
    if (found := first_that_fits(config, devices)) is not None:
        return {**answer, "suggestion": _described(*found)}
    if config.device == "cuda" and (count := gpus_that_fit(config, devices)) is not None:
        return {**answer, "suggestion": f"{count} GPUs like this one would hold it"}
    return answer


def _resolve(options: Mapping[str, Any]) -> EngineConfig:
    """As ``runtime.resolve.resolve_core`` does, but no weights are fetched."""
    from mini_infer.modeling.model_files import load_model_config, locate_model
    from mini_infer.runtime.resolve import parse_options, resolve_config

    given = parse_options(options)
    files = locate_model(given["model"], config_only=True)
    speculation = given["speculative_config"]
    if (
        speculation is not None
        and speculation["method"] == "draft_model"
        and "model" in speculation
    ):
        draft = locate_model(speculation["model"], config_only=True)
        speculation["model"] = str(draft.weights)
    return resolve_config(given, load_model_config(files), files)


def _devices(config: EngineConfig) -> list["DeviceMemory"]:
    """All GPUs, each with what this process itself takes of it, as a rank's would; or the CPU.
    With Ray, those of as many hosts like this one as the ranks take.

    Raises:
        InvalidConfigError: a cluster has GPUs, and this host of it none.
    """
    import psutil
    import torch

    from mini_infer.runtime.memory_plan import DeviceMemory

    if config.device == "cpu":
        memory = psutil.virtual_memory()
        return [DeviceMemory(memory.available, memory.total)]
    gpus = [
        DeviceMemory(*torch.cuda.mem_get_info(index)) for index in range(torch.cuda.device_count())
    ]
    if config.distributed_executor_backend != "ray":
        return gpus
    if not gpus:
        raise InvalidConfigError(
            "the GPUs of this Ray cluster are on other hosts: run the doctor on one of those"
        )
    return [gpus[rank % len(gpus)] for rank in range(max(len(gpus), config.num_ranks))]


def _numbers(plan: "MemoryPlan", devices: Sequence["DeviceMemory"]) -> dict[str, Any]:
    config = plan.config
    return {
        "model": config.model,
        "dtype": config.dtype,
        "device": config.device,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "free_bytes": [device.free for device in devices],
        "rank_weight_bytes": plan.rank_weight_bytes,
        "draft_weight_bytes": plan.draft_weight_bytes,
        "step_bytes": plan.step_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "block_size": config.block_size,
        "num_kv_blocks": plan.num_blocks,
        "num_kv_tokens": plan.num_tokens,
        "longest_request": plan.longest_request,
        "num_longest_requests": plan.num_longest_requests,
        "problem": plan.problem,
        "fits": plan.fits,
        "suggestion": None,
    }


def _described(plan: "MemoryPlan", changes: Mapping[str, Any]) -> str:
    said = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changes.items())
    return (
        f"{said} would fit: {plan.num_tokens} tokens of KV cache, {plan.num_longest_requests} of "
        f"{plan.config.max_model_len} tokens at once"
    )


def _smaller_tp(options: Mapping[str, Any]) -> str | None:
    """The most ranks below those that were asked for with which the engine would start here."""
    from mini_infer.runtime.memory_plan import plan_memory

    asked = options.get("tensor_parallel_size")
    for size in range(asked - 1, 0, -1) if isinstance(asked, int) else ():
        try:
            config = _resolve({**options, "tensor_parallel_size": size})
            plan = plan_memory(config, _devices(config))
        except MiniInferError:
            continue
        if plan.fits:
            return _described(plan, {"tensor_parallel_size": size})
    return None
