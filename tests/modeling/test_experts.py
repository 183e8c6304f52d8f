"""Mixtures of experts over ranks: who has which expert, and that the sum is the whole."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from mini_infer.core.model_config import ExpertsConfig
from mini_infer.modeling.layers import RMSNorm
from mini_infer.modeling.registry import ARCHITECTURES
from mini_infer.modeling.sharded_source import WHOLE, ShardedSource
from mini_infer.modeling.sharding import Shard, build_shard
from mini_infer.modeling.weights import build_model
from mini_infer.parallel.group import TensorParallelGroup
from tests.modeling.fakes import MemorySource, random_tensors
from tests.modeling.tiny_moe import ARCHITECTURE, PLACE, MixtureOfExperts, by_hand
from tests.runtime.engine_tools import generate, greedy
from tests.runtime.fake_executor import TINY_MODEL
from tests.runtime.rank_threads import Meeting, RankThreads, ThreadGroup, sharded_engine
from tests.runtime.tiny_model import tiny_engine

# Neither the experts nor their inner sizes divide by the ranks.
EXPERTS = ExpertsConfig(num_experts=7, expert_size=10, shared_size=21)
MODEL = replace(
    TINY_MODEL, architecture=ARCHITECTURE, num_heads=6, intermediate_size=47, experts=EXPERTS
)
MIXTURE = "model.layers.1.mlp."
PROMPTS = [[5, 6, 7, 8, 9], [1, 2, 3] * 11, list(range(40, 58))]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, ARCHITECTURE, PLACE)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("num_experts", [1, 2, 7, 64])
def test_each_expert_is_on_one_rank(num_experts: int, size: int) -> None:
    config = replace(MODEL, experts=replace(EXPERTS, num_experts=num_experts))
    shards = [Shard(config, rank, size) for rank in range(size)]
    runs = [shard.experts for shard in shards]
    assert [expert for run in runs for expert in run] == list(range(num_experts))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    for shard, run in zip(shards, runs, strict=True):
        assert shard.config.experts is not None
        assert shard.config.experts.here == run
        for expert in range(num_experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                cut = shard.cut_of_model(f"{MIXTURE}experts.{expert}.{part}.weight")
                assert cut == (WHOLE if expert in run else None)
        assert shard.cut_of_model(f"{MIXTURE}gate.weight") == WHOLE


@pytest.mark.parametrize("size", [2, 3])
def test_shared_experts_are_cut_as_an_mlp(size: int) -> None:
    tensors = random_tensors(MODEL)
    sources = [
        ShardedSource(MemorySource(tensors), Shard(MODEL, rank, size).cut_of_model)
        for rank in range(size)
    ]
    for part, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        name = f"{MIXTURE}shared_experts.{part}.weight"
        joined = torch.cat([source.get(name) for source in sources], dim)
        assert torch.equal(joined, tensors[name])


def mixture_of(model: torch.nn.Module) -> MixtureOfExperts:
    [mixture] = [one for one in model.modules() if isinstance(one, MixtureOfExperts)]
    return mixture


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_sum_over_ranks_is_the_mixture_by_hand(size: int) -> None:
    tensors = random_tensors(MODEL)
    source = MemorySource(tensors)
    meeting = Meeting(size)
    groups: list[TensorParallelGroup] = [ThreadGroup(meeting, rank, size) for rank in range(size)]
    models = [
        build_shard(Shard(MODEL, group.rank, size), group, source, torch.float32)
        if size > 1
        else build_model(MODEL, source, torch.float32)
        for group in groups
    ]
    here = [mixture_of(model).experts.keys() for model in models]
    assert [int(number) for keys in here for number in keys] == list(range(7))
    generator = torch.Generator().manual_seed(3)
    residual = torch.randn(9, MODEL.hidden_size, generator=generator)
    norm = RMSNorm(MODEL.hidden_size, 1e-5)
    norm.weight.data.uniform_(0.5, 1.5, generator=generator)
    of_mixture = {
        name.removeprefix(MIXTURE): tensor
        for name, tensor in tensors.items()
        if name.startswith(MIXTURE)
    }
    expected = residual + by_hand(norm(residual), of_mixture, 7)
    with torch.inference_mode(), ThreadPoolExecutor(size) as pool:
        sums = list(
            pool.map(lambda model: mixture_of(model).add_to(residual.clone(), norm), models)
        )
    for total in sums:
        torch.testing.assert_close(total, expected)
        assert torch.equal(total, sums[0]), "the same bits on every rank"


@pytest.mark.parametrize("size", [2, 3, 6])
def test_ranks_say_what_one_process_says(size: int) -> None:
    expected = generate(tiny_engine(model_config=MODEL), PROMPTS, greedy(10))
    engine = sharded_engine(model_config=MODEL, tensor_parallel_size=size)
    assert generate(engine, PROMPTS, greedy(10)) == expected
    ranks = engine.core.executor
    assert isinstance(ranks, RankThreads)
    ranks.assert_same_logits()
    assert len({tuple(map(str, output)) for output in expected}) == len(PROMPTS)


def test_a_mixture_costs_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a feed-forward network does: embedding, then attention and either in each layer."""
    sums: list[int] = []
    all_reduce_ = ThreadGroup.all_reduce_

    def counted(group: ThreadGroup, x: torch.Tensor) -> torch.Tensor:
        sums.append(group.rank)
        return all_reduce_(group, x)

    engine = sharded_engine(model_config=MODEL, tensor_parallel_size=2)
    monkeypatch.setattr(ThreadGroup, "all_reduce_", counted)
    generate(engine, [[1, 2, 3]], greedy(1))
    assert sums.count(0) == sums.count(1) == 1 + 2 * MODEL.num_layers
