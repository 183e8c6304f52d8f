"""What is said of an engine's memory beforehand, against what it takes then."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.model_config import ModelConfig
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.modeling.dummy_source import DummySource
from mini_infer.modeling.memory_profile import SLACK
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.model_runner import ModelRunner
from mini_infer.modeling.proposers.head import DraftHead
from mini_infer.modeling.proposers.head_files import head_bytes, load_draft_head, save_draft_head
from mini_infer.modeling.weights import build_model
from mini_infer.runtime.memory_plan import (
    DeviceMemory,
    first_that_fits,
    gpus_that_fit,
    plan_memory,
)
from tests.runtime.fake_executor import TINY_MODEL, make_config
from tests.runtime.rank_threads import sharded_engine

GIB = 2**30
PLENTY = [DeviceMemory(8 * GIB, 8 * GIB)]
SEVEN_BILLION = ModelConfig.from_dict(
    json.loads((Path(__file__).parents[2] / "benchmarks/models/qwen2.5-7b/config.json").read_text())
)
DRAFT = replace(TINY_MODEL, num_layers=1)


def gpu_config(**options: Any) -> EngineConfig:
    """Of a model of 15.2 GB in bfloat16, on GPUs that are not here."""
    defaults: dict[str, Any] = {"model_config": SEVEN_BILLION, "device": "cuda", "block_size": 16}
    defaults |= {"dtype": "bfloat16", "max_model_len": 32768, "max_num_batched_tokens": 8192}
    defaults |= {"num_kv_blocks": None, "kv_cache_memory": None, "max_num_seqs": 256}
    if options.keys() & {"tensor_parallel_size", "pipeline_parallel_size"}:
        defaults["distributed_executor_backend"] = "mp"
    return make_config(**(defaults | options))


def cards(gib: float, count: int = 1) -> list[DeviceMemory]:
    """GPUs of which a context takes half a GiB."""
    total = int(gib * GIB)
    return [DeviceMemory(total - GIB // 2, total)] * count


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": None, "kv_cache_memory": 10**6},
        {"dtype": "float16"},
        {"block_size": 16, "num_kv_blocks": None, "kv_cache_memory": 10**6 + 1},
        {
            "num_kv_blocks": None,
            "kv_cache_memory": 10**6,
            "load_format": "dummy",
            "speculative_config": SpeculativeConfig(
                method="draft_model", model="unused", model_config=DRAFT, on_device=True
            ),
        },
    ],
    ids=str,
)
def test_an_engine_on_a_cpu_gets_what_the_plan_says(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(**options)
    plan = plan_memory(config, PLENTY)
    nothing = ModelFiles(Path("unused"), Path("unused"))
    monkeypatch.setattr(
        "mini_infer.modeling.proposers.draft_model.locate_model", lambda model: nothing
    )
    runner = ModelRunner(config, nothing)
    runner.load()
    assert plan.num_blocks == runner.profile_num_blocks()
    surplus = int(config.speculates_on_device)
    runner.init_cache(plan.num_blocks)
    caches = list(runner.caches)
    if runner.proposer is not None:
        caches += runner.proposer._caches  # type: ignore[attr-defined]
    kv_bytes = sum(k.nbytes + v.nbytes for k, v in caches)
    assert kv_bytes == (plan.num_blocks + surplus) * plan.rank_block_bytes[0]
    assert plan.fits
    assert plan.problem is None


def test_weights_are_those_of_the_loaded_model() -> None:
    source = DummySource(TINY_MODEL, 0, torch.bfloat16, "cpu")
    model = build_model(TINY_MODEL, source, torch.bfloat16)
    [planned] = plan_memory(make_config(dtype="bfloat16"), PLENTY).rank_weight_bytes
    assert planned == sum(parameter.nbytes for parameter in model.parameters())


def test_ranks_share_weights_and_kv_heads() -> None:
    one = plan_memory(gpu_config(), cards(141))
    two = plan_memory(gpu_config(tensor_parallel_size=2), cards(141, 2))
    four = plan_memory(gpu_config(tensor_parallel_size=4), cards(141, 4))
    seven = plan_memory(gpu_config(tensor_parallel_size=7), cards(141, 7))
    assert sum(two.rank_weight_bytes) == pytest.approx(sum(one.rank_weight_bytes), rel=1e-3)
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token == 57344
    assert four.kv_bytes_per_token * 4 == one.kv_bytes_per_token
    assert seven.kv_bytes_per_token == one.kv_bytes_per_token  # 4 heads begin and end in groups
    assert two.num_tokens > 2 * one.num_tokens


def test_two_ranks_have_mailboxes_of_a_step() -> None:
    config = gpu_config(tensor_parallel_size=2)
    plans = [
        plan_memory(replace(config, custom_all_reduce=on), cards(141, 2)) for on in (True, False)
    ]
    mailboxes = 2 * config.max_step_tokens * SEVEN_BILLION.hidden_size * 2
    assert plans[0].step_bytes - plans[1].step_bytes == mailboxes == 117_440_512
    assert (
        0
        < plans[1].num_blocks - plans[0].num_blocks
        <= mailboxes // min(plans[0].rank_block_bytes) + 1
    )


def test_stages_share_layers_and_their_kv() -> None:
    one = plan_memory(gpu_config(), cards(141))
    two = plan_memory(gpu_config(pipeline_parallel_size=2), cards(141, 2))
    four = plan_memory(gpu_config(pipeline_parallel_size=2, tensor_parallel_size=2), cards(141, 4))
    assert sum(two.rank_weight_bytes) == sum(one.rank_weight_bytes)
    assert sum(two.rank_block_bytes) == sum(one.rank_block_bytes)
    assert two.num_tokens > 1.9 * one.num_tokens
    assert sum(four.rank_weight_bytes) == pytest.approx(sum(one.rank_weight_bytes), rel=1e-3)
    assert four.rank_block_bytes == tuple(size // 2 for size in two.rank_block_bytes for _ in "12")
    assert gpus_that_fit(gpu_config(pipeline_parallel_size=2, max_model_len=8192), cards(10)) == 4


@pytest.mark.parametrize("tied", [False, True])
def test_stages_on_a_cpu_get_what_the_plan_says(tied: bool) -> None:
    model = replace(TINY_MODEL, num_layers=5, tie_word_embeddings=tied)
    engine = sharded_engine(
        model_config=model, pipeline_parallel_size=2, num_kv_blocks=None, kv_cache_memory=10**6
    )
    plan = plan_memory(replace(engine.config, num_kv_blocks=None), PLENTY)
    assert plan.num_blocks == engine.config.num_kv_blocks
    for rank, runner in enumerate(engine.core.executor.runners):  # type: ignore[attr-defined]
        kv_bytes = sum(k.nbytes + v.nbytes for k, v in runner.caches)
        assert kv_bytes == plan.num_blocks * plan.rank_block_bytes[rank]
    engine.shutdown()


def test_the_rank_with_the_least_room_has_the_say() -> None:
    config = gpu_config(tensor_parallel_size=2)
    uneven = plan_memory(config, [*cards(141), DeviceMemory(40 * GIB, 141 * GIB)])
    assert uneven.num_blocks < plan_memory(config, cards(141, 2)).num_blocks // 2
    full = plan_memory(config, [*cards(141), DeviceMemory(4 * GIB, 141 * GIB)])
    assert "rank 1's weights need 7.09 GiB" in str(full.problem)


def test_a_gpus_blocks_are_what_is_left() -> None:
    plan = plan_memory(gpu_config(), cards(141))
    weights = plan.rank_weight_bytes[0]
    assert weights == pytest.approx(15.23e9, rel=0.01)
    [block_bytes] = plan.rank_block_bytes
    taken = GIB // 2 + weights + plan.step_bytes + SLACK + plan.num_blocks * block_bytes
    assert 0 <= int(0.9 * 141 * GIB) - taken < 3 * block_bytes
    assert 1 * GIB < plan.step_bytes < 4 * GIB
    assert plan.fits
    assert plan.num_longest_requests == plan.num_tokens // 32768


def test_a_gpus_blocks_are_no_more_than_all_slots_can_fill() -> None:
    plan = plan_memory(gpu_config(max_num_seqs=2, max_model_len=1024), cards(141))
    assert plan.num_blocks == 2 * 1024 // 16
    assert plan.num_longest_requests == 2


@pytest.mark.parametrize(
    ("options", "devices", "changes"),
    [
        ({"dtype": "float32"}, cards(30), {"dtype": "bfloat16"}),
        ({"dtype": "float32"}, cards(30, 2), {"dtype": "bfloat16"}),
        ({}, cards(16, 4), {"tensor_parallel_size": 2}),
        ({"tensor_parallel_size": 2}, cards(8, 4), {"tensor_parallel_size": 4}),
        (
            {"dtype": "float32"},
            cards(14, 4),
            {"dtype": "bfloat16", "tensor_parallel_size": 2},
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_first_plan_that_fits(
    options: dict[str, Any], devices: list[DeviceMemory], changes: dict[str, Any]
) -> None:
    config = gpu_config(max_model_len=8192, **options)
    assert not plan_memory(config, devices).fits
    found = first_that_fits(config, devices)
    assert found is not None
    plan, said = found
    assert said == changes
    assert plan.fits


def test_shorter_requests_fit_where_nothing_else_helps() -> None:
    devices = cards(20.5)
    plan = plan_memory(gpu_config(), devices)
    assert plan.problem is None
    assert not plan.fits
    found = first_that_fits(gpu_config(), devices)
    assert found is not None
    shorter, said = found
    assert list(said) == ["max_model_len"]
    assert said["max_model_len"] >= plan.longest_request
    assert shorter.num_longest_requests == 1


def test_more_gpus_than_there_are() -> None:
    config = gpu_config(max_model_len=8192)
    assert first_that_fits(config, cards(10)) is None
    assert gpus_that_fit(config, cards(10)) == 4
    assert gpus_that_fit(config, cards(1)) is None


def test_what_was_asked_for_may_be_too_much() -> None:
    assert plan_memory(gpu_config(num_kv_blocks=1000), cards(24)).problem is None
    too_many = plan_memory(gpu_config(num_kv_blocks=10_000), cards(24))
    assert "10000 KV blocks need 8.55 GiB" in str(too_many.problem)
    assert "no KV block" in str(plan_memory(gpu_config(kv_cache_memory=10), cards(24)).problem)
    on_cpu = make_config(num_kv_blocks=10**7)
    assert "are left beside the weights" in str(plan_memory(on_cpu, PLENTY).problem)
    assert "the weights need" in str(plan_memory(on_cpu, [DeviceMemory(10, 10)]).problem)


def test_heads_that_can_not_be_shared_out() -> None:
    with pytest.raises(InvalidConfigError, match="does not divide"):
        plan_memory(gpu_config(tensor_parallel_size=3), cards(141, 3))


@pytest.mark.parametrize("parallel", [False, True])
def test_a_draft_head_counts(parallel: bool, tmp_path: Path) -> None:
    model = build_model(TINY_MODEL, DummySource(TINY_MODEL, 0, torch.float32), torch.float32)
    head = DraftHead(model, 10, parallel=parallel)
    for parameter in head.parameters():
        parameter.data.zero_()
    head.token_ids.copy_(torch.arange(10))
    save_draft_head(tmp_path, head, model, torch.float32)
    loaded = load_draft_head(tmp_path, model, torch.float32)
    kept = [*head.parameters(), head.token_ids]
    kept += [loaded.later.by_draft] if loaded.later else []
    expected = sum(tensor.nbytes for tensor in kept)
    assert head_bytes(tmp_path, TINY_MODEL, torch.float32) == expected
    speculation = SpeculativeConfig(method="head", model=str(tmp_path), on_device=True)
    plan = plan_memory(make_config(speculative_config=speculation), PLENTY)
    assert plan.draft_weight_bytes == expected
