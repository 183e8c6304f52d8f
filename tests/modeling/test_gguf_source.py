"""Weights out of GGUF files: every quantisation type, names, row order, and damaged files."""

import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from mini_infer.core.errors import UnsupportedModelError, WeightsError
from mini_infer.modeling.gguf_source import GGUFSource, unpermute_rotary_rows
from tests.modeling.gguf_files import MODELS, tiny_model, write_gguf, write_model

Kind = gguf.GGMLQuantizationType
NAME, HF_NAME = "blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"


ONE_FLOAT = struct.pack("<Q1sIQIQ", 1, b"t", 1, 1, Kind.F32, 0)
"""Header of a tensor t of one value."""


def one_tensor(path: Path, data: np.ndarray, kind: Kind | None = None) -> GGUFSource:
    return GGUFSource(write_gguf(path, "qwen2", {}, {NAME: (data, kind)}))


# Dequantisers written from the block formats' description, one value at a time.


def half(raw: bytes) -> float:
    return float(struct.unpack("<e", raw)[0])


def q4_0(block: bytes) -> Iterator[float]:
    scale, packed = half(block[:2]), block[2:]
    yield from (scale * ((byte & 15) - 8) for byte in packed)
    yield from (scale * ((byte >> 4) - 8) for byte in packed)


def q4_1(block: bytes) -> Iterator[float]:
    scale, least, packed = half(block[:2]), half(block[2:4]), block[4:]
    yield from (scale * (byte & 15) + least for byte in packed)
    yield from (scale * (byte >> 4) + least for byte in packed)


def q8_0(block: bytes) -> Iterator[float]:
    yield from (half(block[:2]) * value for value in struct.unpack("<32b", block[2:]))


def q4_k(block: bytes) -> Iterator[float]:
    scale, least, packed_scales, packed = half(block[:2]), half(block[2:4]), block[4:16], block[16:]

    def sub_block(index: int) -> tuple[int, int]:
        if index < 4:
            return packed_scales[index] & 63, packed_scales[index + 4] & 63
        low = packed_scales[index + 4]
        return (
            (low & 15) | (packed_scales[index - 4] >> 6) << 4,
            (low >> 4) | (packed_scales[index] >> 6) << 4,
        )

    for index in range(8):
        sub_scale, sub_least = sub_block(index)
        for byte in packed[index // 2 * 32 : index // 2 * 32 + 32]:
            value = byte >> 4 if index % 2 else byte & 15
            yield scale * sub_scale * value - least * sub_least


def q6_k(block: bytes) -> Iterator[float]:
    low, high = block[:128], block[128:192]
    sub_scales, scale = struct.unpack("<16b", block[192:208]), half(block[208:])
    for index in range(256):
        part, within = divmod(index, 128)
        quarter, lane = divmod(within, 32)
        nibbles = low[part * 64 + quarter % 2 * 32 + lane]
        nibble = nibbles >> 4 if quarter >= 2 else nibbles & 15
        top = high[part * 32 + lane] >> (2 * quarter) & 3
        yield scale * sub_scales[index // 16] * ((nibble | top << 4) - 32)


BLOCKS: dict[str, tuple[int, tuple[int, ...], Callable[[bytes], Iterator[float]]]] = {
    # type: bytes per block, where its float16 scales lie, dequantiser
    "Q4_0": (18, (0,), q4_0),
    "Q4_1": (20, (0, 2), q4_1),
    "Q8_0": (34, (0,), q8_0),
    "Q4_K": (144, (0, 2), q4_k),
    "Q6_K": (210, (208,), q6_k),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_dequantised_as_the_format_says(tmp_path: Path, name: str) -> None:
    num_bytes, scale_offsets, dequantise = BLOCKS[name]
    generator = np.random.default_rng(3)
    raw = generator.integers(0, 256, (3, 2, num_bytes), dtype=np.uint8)  # [rows, blocks, bytes]
    for block in raw.reshape(-1, num_bytes):
        for offset in scale_offsets:
            scale = np.float16(generator.normal() / 16)
            block[offset : offset + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    source = one_tensor(tmp_path / "m.gguf", raw.reshape(3, -1), Kind[name])

    expected = [[v for block in row for v in dequantise(block.tobytes())] for row in raw]
    found = source.get(HF_NAME)
    assert source.shape(HF_NAME) == tuple(found.shape) == (3, len(expected[0]))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "tolerance"), [("Q4_0", 0.3), ("Q4_1", 0.2), ("Q8_0", 0.02), ("BF16", 0.02)]
)
def test_quantised_values_come_back(tmp_path: Path, name: str, tolerance: float) -> None:
    values = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, Kind[name])
    found = one_tensor(tmp_path / "m.gguf", raw, Kind[name]).get(HF_NAME)
    assert np.abs(found.numpy() - values).max() < tolerance


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_floats_are_read_exactly(tmp_path: Path, dtype: type) -> None:
    values = np.random.default_rng(1).normal(size=(5, 7)).astype(dtype)
    found = one_tensor(tmp_path / "m.gguf", values).get(HF_NAME)
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), values.astype(np.float32))


def test_bfloat16_is_read_exactly(tmp_path: Path) -> None:
    values = torch.randn(5, 8).bfloat16()
    raw = values.view(torch.uint8).numpy()
    found = one_tensor(tmp_path / "m.gguf", raw, Kind.BF16).get(HF_NAME)
    assert torch.equal(found, values.float())


def test_a_tensor_is_its_own_memory(tmp_path: Path) -> None:
    source = one_tensor(tmp_path / "m.gguf", np.ones((2, 4), np.float32))
    source.get(HF_NAME).zero_()
    assert torch.equal(source.get(HF_NAME), torch.ones(2, 4))


@pytest.mark.parametrize("name", MODELS)
def test_names_and_values_are_hugging_faces(tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    source = GGUFSource(write_model(tmp_path / "m.gguf", model))
    expected = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert set(source.names()) == set(expected)
    for tensor_name, tensor in expected.items():
        assert source.shape(tensor_name) == tuple(tensor.shape)
        assert torch.equal(source.get(tensor_name), tensor), tensor_name


def test_row_order_agrees_with_transformers_own_reader(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model("llama-untied"), "gpt-2")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    source = GGUFSource(path)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(source.get(name), tensor), name


def test_unpermuting_puts_pairs_into_halves() -> None:
    rows = torch.tensor([0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15])
    expected = torch.tensor([0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15])
    assert torch.equal(unpermute_rotary_rows(rows, 2), expected)


def test_rotary_tables_are_no_weights(tmp_path: Path) -> None:
    tensors = {NAME: np.ones((2, 4), np.float32), "rope_freqs.weight": np.ones(4, np.float32)}
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", "qwen2", {}, tensors))
    assert list(source.names()) == [HF_NAME]


@pytest.mark.parametrize("name", ["blk.0.ffn_mystery.weight", "v.patch_embd.weight", "position"])
def test_a_tensor_without_a_counterpart_is_named(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen2", {}, {name: np.ones((2, 4), np.float32)})
    with pytest.raises(WeightsError, match=f"m.gguf.*{re.escape(name)}"):
        GGUFSource(path)


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    source = one_tensor(tmp_path / "m.gguf", np.ones((2, 4), np.float32))
    with pytest.raises(WeightsError, match=r"m.gguf holds no tensor lm_head.weight"):
        source.get("lm_head.weight")


def test_an_unknown_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "mamba", {}, {})
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*llama, qwen2, qwen3"):
        GGUFSource(path)


def test_experts_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", {"llama.expert_count": 8}, {})
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        GGUFSource(path)


def test_one_file_of_several_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", {"split.count": 3}, {})
    with pytest.raises(UnsupportedModelError, match=r"one of 3 files .* join them first"):
        GGUFSource(path)


def test_an_unsupported_quantisation_names_file_tensor_and_type(tmp_path: Path) -> None:
    raw = gguf.quants.quantize(np.ones((2, 32), np.float32), Kind.Q5_0)
    with pytest.raises(WeightsError, match=f"m.gguf: tensor {NAME} .*Q5_0.*Q4_K, Q6_K"):
        one_tensor(tmp_path / "m.gguf", raw, Kind.Q5_0)


def test_an_unknown_quantisation_names_its_number(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen2", {}, {NAME: np.ones((2, 32), np.float32)})
    data = bytearray(path.read_bytes())
    # After the tensor's name: dimension count (4 bytes), two dimensions (16), then the type.
    at = data.index(NAME.encode()) + len(NAME) + 20
    data[at : at + 4] = struct.pack("<I", 999)
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=f"tensor {NAME} .*number 999"):
        GGUFSource(path)


def test_a_file_cut_in_its_last_tensor_names_it(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tiny_model("llama"))
    last = list(GGUFSource(path)._gguf_names.values())[-1]
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(WeightsError, match=rf"m.gguf: truncated: tensor {last} ends at byte \d+"):
        GGUFSource(path)


def test_a_file_cut_anywhere_is_a_weights_error(tmp_path: Path) -> None:
    metadata = {"a.list": [1, 2, 3], "a.names": ["x", "yz"], "a.float": 0.5, "a.flag": True}
    tensors = {NAME: np.ones((2, 4), np.float32), "output.weight": np.ones((2, 4), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "qwen2", metadata, tensors)
    data = path.read_bytes().rstrip(b"\0")  # the end of the file is padding
    for length in range(len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(WeightsError, match=r"m\.gguf"):
            GGUFSource(path)


def test_flipped_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    metadata = {"a.list": [1, 2, 3], "a.names": ["x", "yz"], "a.float": 0.5}
    path = write_gguf(tmp_path / "m.gguf", "qwen2", metadata, {NAME: np.ones((2, 4), np.float32)})
    data = path.read_bytes()
    refused = 0
    for position in range(len(data) - 64):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :])
        try:
            GGUFSource(path)
        except (WeightsError, UnsupportedModelError):
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GGML" + bytes(60), "does not begin with 'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "only .* in little-endian order"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 0, 2**61), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "an array of type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"\xff", 0), "not valid UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), "tensor t has 9 dimensions"),
        (
            b"GGUF" + struct.pack("<IQQQ17sII", 3, 0, 1, 17, b"general.alignment", 4, 0),
            "general.alignment is 0",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + 2 * ONE_FLOAT + bytes(64),
            "two tensors are named t",
        ),
    ],
)
def test_a_corrupt_header_is_a_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=message) as raised:
        GGUFSource(path)
    assert str(path) in str(raised.value)


def test_rows_that_are_not_whole_blocks_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen2", {}, {NAME: np.ones((2, 33), np.float32)})
    data = bytearray(path.read_bytes())
    at = data.index(NAME.encode()) + len(NAME) + 20
    data[at : at + 4] = struct.pack("<I", Kind.Q8_0)
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=f"tensor {NAME} .*whole Q8_0 blocks of 32"):
        GGUFSource(path)


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"m.gguf can't be read: No such file"):
        GGUFSource(tmp_path / "m.gguf")
