"""A rank's part of a checkpoint: nothing is lost, nothing is there twice, nothing else is read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from mini_infer.core.errors import InvalidConfigError, UnsupportedModelError, WeightsError
from mini_infer.modeling.dummy_source import DummySource
from mini_infer.modeling.gguf_source import GGUFSource
from mini_infer.modeling.model_files import load_model_config, locate_model
from mini_infer.modeling.safetensors_header import read_header
from mini_infer.modeling.safetensors_source import SINGLE_FILE, SafetensorsSource
from mini_infer.modeling.sharded_source import Cut, ShardedSource
from mini_infer.modeling.sharding import Shard, build_shard, check_divides
from mini_infer.modeling.weight_stream import Staging, stream_tensors
from mini_infer.modeling.weights import WeightSource, checkpoint_places, checkpoint_shapes
from mini_infer.parallel.group import TensorParallelGroup
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.local_executor import LocalExecutor
from tests.modeling.fakes import MemorySource, random_tensors, tiny_config
from tests.modeling.gguf_files import tiny_model, write_model
from tests.runtime.engine_tools import generate, greedy
from tests.runtime.fake_executor import make_config
from tests.runtime.rank_threads import sharded_engine

WIDE = {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 47}
BIASED = tiny_config(**WIDE, head_dim=8, attention_bias=True, mlp_bias=True, vocab_size=65)


class Rank(TensorParallelGroup):
    """One that is never asked for its collectives."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def parts(name: str, source: WeightSource, size: int, **changes: Any) -> list[Tensor]:
    config = replace(BIASED, **changes)
    shards = [Shard(config, rank, size) for rank in range(size)]
    sources = [ShardedSource(source, shard.cut_of_model) for shard in shards]
    return [sharded.get(name) for sharded in sources if name in sharded.names()]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_parts_of_all_ranks_are_the_whole(size: int) -> None:
    tensors = random_tensors(BIASED)
    source = MemorySource(tensors)
    for name, whole in tensors.items():
        module = name.split(".")[-2]
        found = parts(name, source, size)
        if module in ("o_proj", "down_proj") and name.endswith("bias"):
            assert len(found) == 1
            assert torch.equal(found[0], whole)
        elif module.endswith("norm"):
            assert all(torch.equal(part, whole) for part in found)
        elif module in ("o_proj", "down_proj"):
            assert torch.equal(torch.cat(found, dim=1), whole)
        elif module in ("q_proj", "gate_proj", "up_proj"):
            assert torch.equal(torch.cat(found), whole)
        elif module in ("embed_tokens", "lm_head"):
            joined = torch.cat(found)
            assert torch.equal(joined[: len(whole)], whole)
            assert not joined[len(whole) :].any()
        else:
            assert module in ("k_proj", "v_proj")


@given(st.integers(1, 24), st.integers(1, 24), st.data())
def test_each_query_head_finds_its_keys(num_kv_heads: int, group: int, data: st.DataObject) -> None:
    """A rank's model takes its own groups of heads for the model's."""
    num_heads = num_kv_heads * group
    size = data.draw(st.sampled_from([n for n in range(1, num_heads + 1) if num_heads % n == 0]))
    config = replace(BIASED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=2)
    heads = torch.arange(num_kv_heads).repeat_interleave(2)
    tokens, counts = [], []
    for rank in range(size):
        shard = Shard(config, rank, size)
        cut = shard.cut("layers.0.self_attn.k_proj.weight")
        assert cut is not None
        assert cut.runs is not None
        mine = torch.cat([heads[run.start : run.stop] for run in cut.runs])[::2]
        assert len(mine) == shard.config.num_kv_heads
        assert shard.config.num_heads % len(mine) == 0
        tokens += mine.repeat_interleave(shard.config.num_heads // len(mine)).tolist()
        counts.append(len(mine))
    assert tokens == [head // group for head in range(num_heads)]
    assert len(set(counts)) == 1
    if num_kv_heads % size == 0:
        assert counts[0] == num_kv_heads // size


def test_a_size_that_cuts_heads_is_refused() -> None:
    check_divides(BIASED, 3)
    with pytest.raises(InvalidConfigError, match=r"4 does not divide .* 6 .* may be 1, 2, 3, 6"):
        check_divides(BIASED, 4)


def test_more_ranks_than_tokens() -> None:
    config = replace(BIASED, vocab_size=4)
    shards = [Shard(config, rank, 6) for rank in range(6)]
    assert [list(shard.vocabulary) for shard in shards] == [[0], [1], [2], [3], [], []]
    source = MemorySource({"lm_head.weight": torch.ones(4, 3)})
    found = [ShardedSource(source, shard.cut_of_model).get("lm_head.weight") for shard in shards]
    assert torch.equal(torch.cat(found).sum(1), torch.tensor([3.0, 3, 3, 3, 0, 0]))


CUTS = [
    Cut(0, (range(2, 5),)),
    Cut(1, (range(1, 6),)),
    Cut(0, (range(4, 6), range(0, 1), range(4, 6))),
    Cut(0, (range(6, 8),), 4),
    Cut(),
]


def cut_by_hand(tensor: Tensor, cut: Cut) -> Tensor:
    if cut.runs is None:
        return tensor
    taken = torch.cat([tensor.narrow(cut.dim, run.start, len(run)) for run in cut.runs], cut.dim)
    surplus = 0 if cut.size is None else cut.size - taken.shape[cut.dim]
    return torch.cat([taken, taken.new_zeros(surplus, *taken.shape[1:])]) if surplus else taken


@pytest.mark.parametrize("cut", CUTS)
def test_a_checkpoints_slices_are_read(cut: Cut, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3), "b": torch.randn(8, 7), "c": torch.randn(8, 7).bfloat16()}
    save_file(tensors, tmp_path / SINGLE_FILE)

    def cut_of(name: str) -> Cut | None:
        return None if name == "a" else cut

    source = ShardedSource(SafetensorsSource(tmp_path), cut_of)
    assert list(source.names()) == ["b", "c"]
    expected = {name: cut_by_hand(tensors[name], cut) for name in ("b", "c")}
    places = {name: torch.full(value.shape, torch.nan) for name, value in expected.items()}
    kept = dict(places)
    assert sorted(source.load_into(places)) == ["b", "c"]
    assert not places
    for name, value in expected.items():
        assert source.shape(name) == tuple(value.shape)
        assert torch.equal(source.get(name), value)
        assert torch.equal(kept[name], value.float())


@pytest.mark.parametrize("buffer_bytes", [8, 24, 4096])
def test_rows_are_streamed_without_their_neighbours(buffer_bytes: int, tmp_path: Path) -> None:
    """What a GPU's load does: here a copy to the device is a copy."""
    tensors = {"b": torch.randn(8, 3), "c": torch.randn(6).bfloat16()}
    save_file(tensors, tmp_path / SINGLE_FILE)
    rows = {"b": range(3, 5), "c": range(0, 4)}
    stored = [tensor.rows(rows[tensor.name]) for tensor in read_header(tmp_path / SINGLE_FILE)]
    assert sum(tensor.nbytes for tensor in stored) == 2 * 3 * 4 + 4 * 2
    places = {
        name: torch.full((len(run), *tensors[name].shape[1:]), torch.nan)
        for name, run in rows.items()
    }
    kept = dict(places)
    assert set(stream_tensors(stored, places, Staging(buffer_bytes, 2, 1))) == {"b", "c"}
    for name, run in rows.items():
        assert torch.equal(kept[name], tensors[name][run.start : run.stop].float())


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_rows_of_a_gguf_are_dequantised_alone(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    source = GGUFSource(write_model(tmp_path / "model.gguf", model))
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    for name in source.names():
        whole = source.get(name)
        rows = range(head_dim, len(whole))
        assert torch.equal(source.get_part(name, 0, rows), whole[head_dim:])
        if whole.dim() > 1:
            assert torch.equal(source.get_part(name, 1, range(3, 9)), whole[:, 3:9])


def test_ranks_of_a_gguf_say_what_one_process_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINI_INFER_CACHE", str(tmp_path / "cache"))
    files = locate_model(str(write_model(tmp_path / "model.gguf", tiny_model("llama"))))
    options = {"model_config": load_model_config(files), "load_format": "gguf"}
    options["max_model_len"] = 64
    config = make_config(**options)
    engine = LLMEngine(config, LocalExecutor(config, files), ByteTokenizer())
    prompts = [[5, 6, 7, 8, 9], [1, 2, 3] * 5]
    expected = generate(engine, prompts, greedy(12))
    sharded = sharded_engine(files, tensor_parallel_size=4, **options)
    assert generate(sharded, prompts, greedy(12)) == expected


def test_random_weights_are_those_of_the_whole() -> None:
    source = DummySource(BIASED, 5, torch.float32)
    for name in checkpoint_shapes(BIASED):
        for rank in range(3):
            shard = Shard(BIASED, rank, 3)
            cut = shard.cut_of_model(name)
            if cut is not None:
                sharded = ShardedSource(source, shard.cut_of_model)
                assert torch.equal(sharded.get(name), cut_by_hand(source.get(name), cut))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_has_its_share_of_every_parameter(rank: int) -> None:
    group = Rank(rank, 3)
    shard = Shard(BIASED, rank, 3)
    source = MemorySource(random_tensors(BIASED))
    model = build_shard(shard, group, source, torch.bfloat16)  # which nothing packs
    assert model.whole_config == BIASED
    assert model.config == replace(shard.config, vocab_size=BIASED.vocab_size)
    sharded = ShardedSource(source, shard.cut_of_model)
    places = checkpoint_places(model)
    assert places.keys() == set(sharded.names())
    for name, place in places.items():
        assert torch.equal(place.float(), sharded.get(name).bfloat16().float()), name
    assert sum(place.nbytes for place in places.values()) < 0.42 * sum(
        2 * tensor.numel() for tensor in source.tensors.values()
    )


def test_a_wrong_checkpoint_is_told_by_its_whole_shapes() -> None:
    tensors = random_tensors(BIASED)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(40, 32)
    shard = Shard(BIASED, 1, 2)
    with pytest.raises(WeightsError, match=r"up_proj.weight has shape \[40, 32\], .* \[47, 32\]"):
        build_shard(shard, Rank(1, 2), MemorySource(tensors), torch.float32)


def test_an_architecture_that_no_rule_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm over all heads together, say, has no part that a rank could compute by itself."""
    cut = Shard.cut
    monkeypatch.setattr(Shard, "cut", lambda self, name: cut(self, name.replace("k_proj", "norm")))
    source = MemorySource(random_tensors(BIASED))
    with pytest.raises(UnsupportedModelError, match=r"no rule .* fits .*0.self_attn.k_proj.weight"):
        build_shard(Shard(BIASED, 1, 2), Rank(1, 2), source, torch.float32)
