import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from peer_llama_cpp import _interleave_rotary_halves, batched_bench, find_binary, write_f16_gguf

from mini_infer.core.errors import UnsupportedModelError
from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling.gguf_source import unpermute_rotary_rows
from mini_infer.modeling.model_files import load_model_config, locate_model


@pytest.fixture
def config(model_folder: Path) -> ModelConfig:
    return load_model_config(locate_model(str(model_folder)))


def program(folder: Path, text: str) -> str:
    """An executable that stands for llama-batched-bench."""
    path = folder / "bench"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_gguf_has_every_tensor(model_folder: Path, config: ModelConfig, tmp_path: Path) -> None:
    path = tmp_path / "f16.gguf"
    write_f16_gguf(model_folder, config, path)
    reader = gguf.GGUFReader(path)
    types = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    assert len(types) == 9 * config.num_layers + 3
    assert types["blk.1.attn_q.weight"] == gguf.GGMLQuantizationType.F16
    assert types["blk.0.attn_norm.weight"] == gguf.GGMLQuantizationType.F32
    assert reader.fields["llama.attention.head_count_kv"].contents() == config.num_kv_heads
    assert reader.fields["llama.vocab_size"].contents() == config.vocab_size


@pytest.mark.parametrize("shape", [(24, 5), (24,)])
def test_rotary_rows_as_our_own_reader_expects_them(shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(0).normal(size=shape)
    written = torch.from_numpy(_interleave_rotary_halves(rows, 3).copy())
    assert torch.equal(unpermute_rotary_rows(written, 3), torch.from_numpy(rows))


@pytest.mark.parametrize("change", ["architecture", "rope"])
def test_what_cannot_be_converted(
    change: str, model_folder: Path, config: ModelConfig, tmp_path: Path
) -> None:
    changes = {
        "architecture": replace(config, architecture="OtherForCausalLM"),
        "rope": replace(config, rope=replace(config.rope, rope_type="yarn")),
    }
    with pytest.raises(UnsupportedModelError, match=r"llama\.cpp"):
        write_f16_gguf(model_folder, changes[change], tmp_path / "f16.gguf")


def test_lines_of_the_program(tmp_path: Path) -> None:
    lines = [{"pl": 1, "t": 0.5}, {"pl": 8, "t": 2.0}]
    text = "echo loading\n" + "\n".join(f"echo '{json.dumps(line)}'" for line in lines)
    binary = find_binary(program(tmp_path, text))
    assert binary is not None
    assert batched_bench(binary, tmp_path / "m.gguf", [1, 8], 4, 4, 2) == lines


@pytest.mark.parametrize(
    ("text", "message"),
    [("echo bad model >&2; exit 1", "bad model"), ("echo '{\"pl\": 4}'", '{"pl": 4}')],
)
def test_a_program_that_fails(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        batched_bench(program(tmp_path, text), tmp_path / "m.gguf", [1], 4, 4, 2)


def test_a_program_that_is_not_there() -> None:
    assert find_binary("/no/such/program") is None
