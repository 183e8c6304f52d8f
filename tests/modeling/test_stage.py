"""Layers shared out to stages: each is somewhere, none twice, and the dearest stage is cheap."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.core.errors import InvalidConfigError
from mini_infer.modeling.sharding import Shard, build_shard
from mini_infer.modeling.stage import share_out
from mini_infer.modeling.weights import checkpoint_shapes, share_out_layers
from mini_infer.parallel.group import SINGLE
from tests.modeling.fakes import MemorySource, random_tensors, tiny_config

COSTS = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=7)


@given(costs=COSTS, end=st.integers(0, 20), count=st.integers(1, 4))
def test_the_dearest_stage_is_as_cheap_as_it_can_be(
    costs: list[float], end: float, count: int
) -> None:
    if count > len(costs):
        with pytest.raises(InvalidConfigError, match=f"more than the model's {len(costs)} layers"):
            share_out(costs, end, count)
        return
    runs = share_out(costs, end, count)
    assert [layer for run in runs for layer in run] == list(range(len(costs)))
    assert all(runs)

    def dearest(ends: tuple[int, ...]) -> float:
        starts = (0, *ends)
        sums = [sum(costs[a:b]) for a, b in zip(starts, (*ends, len(costs)), strict=True)]
        return max([*sums[:-1], sums[-1] + end])

    every_way = itertools.combinations(range(1, len(costs)), count - 1)
    assert dearest(tuple(run.start for run in runs[1:])) == min(map(dearest, every_way))


def test_the_head_is_worth_layers() -> None:
    """That of Qwen2.5-7B as many weights as two and a third of its 28."""
    shape = {"hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064}
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28}
    config = replace(tiny_config(**shape, **heads), head_dim=128)
    assert [len(stage.layers) for stage in share_out_layers(config, 2)] == [15, 13]
    assert [len(stage.layers) for stage in share_out_layers(config, 4)] == [7, 8, 8, 5]


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_reads_its_part_of_the_checkpoint(tied: bool) -> None:
    config = tiny_config(num_hidden_layers=3, tie_word_embeddings=tied)
    tensors = random_tensors(config)
    read: list[set[str]] = []

    class Watched(MemorySource):
        def get(self, name: str) -> torch.Tensor:
            read[-1].add(name)
            return super().get(name)

    for stage in share_out_layers(config, 3):
        read.append(set())
        source = Watched(tensors)
        model = build_shard(Shard(config, 0, 1), SINGLE, source, torch.float32, stage=stage)
        assert len(model.layers) == len(stage.layers) == 1
    assert set().union(*read) == set(checkpoint_shapes(config))
    table = {"model.embed_tokens.weight"}
    assert read[0] & read[1] == read[1] & read[2] == set()
    assert read[0] & read[2] == (table if tied else set())
