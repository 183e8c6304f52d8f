"""Bytes of a checkpoint through small buffers into parameters; the target is a CPU's memory."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from mini_infer.core.errors import WeightsError
from mini_infer.modeling.safetensors_header import StoredTensor, read_header
from mini_infer.modeling.safetensors_source import SafetensorsSource
from mini_infer.modeling.weight_stream import Staging, plan_chunks, stream_tensors
from tests.modeling.fakes import write_shards

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SHAPES = [(7, 5), (1,), (3, 3, 3), (64,), (2, 9)]


def tensors_of(dtypes: list[torch.dtype]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        f"t{i}": torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)])
        for i, shape in enumerate(SHAPES)
    }


def places_for(tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Poisoned: an element that is never written shows."""
    return {
        name: torch.full(tensor.shape, torch.nan, dtype=dtype or tensor.dtype)
        for name, tensor in tensors.items()
    }


def stored(folder: Path) -> list[StoredTensor]:
    return [tensor for path in sorted(folder.glob("*.safetensors")) for tensor in read_header(path)]


@pytest.mark.parametrize("buffer_bytes", [8, 10, 24, 64, 4096])
@pytest.mark.parametrize(("num_buffers", "num_readers"), [(2, 1), (3, 2), (9, 8)])
def test_every_element_arrives(
    tmp_path: Path, buffer_bytes: int, num_buffers: int, num_readers: int
) -> None:
    """Also where a tensor is cut, a buffer holds several, and dtypes leave parts unaligned."""
    tensors = tensors_of(list(DTYPES.values()))
    write_shards(tmp_path, tensors, 2)
    places = places_for(tensors)
    kept = dict(places)
    order = list(
        stream_tensors(stored(tmp_path), places, Staging(buffer_bytes, num_buffers, num_readers))
    )
    assert order == [tensor.name for tensor in stored(tmp_path)]
    assert not places
    for name, tensor in tensors.items():
        assert torch.equal(kept[name], tensor)


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("buffer_bytes", [8, 30, 4096])
def test_dtypes_are_converted_as_torch_does(
    tmp_path: Path, wanted: torch.dtype, buffer_bytes: int
) -> None:
    tensors = tensors_of(list(DTYPES.values()))
    save_file(tensors, tmp_path / "model.safetensors")
    places = places_for(tensors, wanted)
    kept = dict(places)
    list(stream_tensors(stored(tmp_path), places, Staging(buffer_bytes, 3, 2)))
    for name, tensor in tensors.items():
        assert torch.equal(kept[name], tensor.to(wanted))


def test_a_place_may_be_a_part_of_a_parameter(tmp_path: Path) -> None:
    tensors = {"q": torch.randn(4, 6), "k": torch.randn(2, 6)}
    save_file(tensors, tmp_path / "model.safetensors")
    packed = torch.full((6, 6), torch.nan)
    places = dict(zip(tensors, packed.split((4, 2)), strict=True))
    list(stream_tensors(stored(tmp_path), places, Staging(40, 2, 1)))
    assert torch.equal(packed, torch.cat(list(tensors.values())))


def test_a_tensor_is_announced_once_it_is_whole(tmp_path: Path) -> None:
    tensors = tensors_of([torch.float32])
    save_file(tensors, tmp_path / "model.safetensors")
    places = places_for(tensors)
    kept = dict(places)
    for name in stream_tensors(stored(tmp_path), places, Staging(16, 2, 1)):
        assert name not in places
        assert torch.equal(kept[name], tensors[name])


def test_tensors_that_nobody_wants_are_not_read(tmp_path: Path) -> None:
    tensors = tensors_of([torch.float32])
    save_file(tensors, tmp_path / "model.safetensors")
    wanted = [tensor for tensor in stored(tmp_path) if tensor.name != "t2"]
    places = places_for(tensors)
    del places["t2"]
    assert sum(chunk.nbytes for chunk in plan_chunks(wanted, 4096)) == sum(
        tensor.nbytes for tensor in wanted
    )
    kept = dict(places)
    list(stream_tensors(wanted, places, Staging(4096, 2, 1)))
    assert all(torch.equal(kept[name], tensors[name]) for name in kept)


@given(
    st.lists(st.tuples(st.sampled_from(list(DTYPES)), st.integers(0, 40), st.integers(0, 2))),
    st.integers(8, 100),
)
def test_chunks_tile_the_tensors(layout: list[tuple[str, int, int]], limit: int) -> None:
    tensors: list[StoredTensor] = []
    end = 8
    for number, (word, count, gap) in enumerate(layout):
        nbytes = count * DTYPES[word].itemsize
        tensor = StoredTensor(str(number), Path("a"), end + gap, nbytes, (count,), word)
        tensors.append(tensor)
        end = tensor.offset + nbytes
    chunks = list(plan_chunks(tensors, limit))
    parts = [part for chunk in chunks for part in chunk.parts]
    assert [part.tensor.name for part in parts if part.is_last] == [t.name for t in tensors]
    for chunk in chunks:
        assert 0 <= chunk.nbytes <= limit
        offset = chunk.offset
        for part in chunk.parts:
            assert offset == part.tensor.offset + part.begin
            assert part.begin % part.tensor.dtype.itemsize == 0
            assert part.nbytes % part.tensor.dtype.itemsize == 0
            offset += part.nbytes
        assert offset == chunk.offset + chunk.nbytes
    for before, after in pairwise(parts):
        if before.tensor is after.tensor:
            assert after.begin == before.begin + before.nbytes


@pytest.mark.parametrize("keep", [0, -1, -100])
def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path, keep: int) -> None:
    tensors = tensors_of([torch.float32])
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    headers = stored(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors is truncated"):
        list(stream_tensors(headers, places_for(tensors), Staging(16, 3, 2)))


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    tensors = tensors_of([torch.float32])
    paths = write_shards(tmp_path, tensors, 2)
    headers = stored(tmp_path)
    paths[1].unlink()
    with pytest.raises(WeightsError, match=f"{paths[1].name} is missing"):
        list(stream_tensors(headers, places_for(tensors), Staging(16, 3, 2)))


def test_a_load_that_is_given_up_ends_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[ThreadPoolExecutor] = []

    def watched(*arguments: object) -> ThreadPoolExecutor:
        pools.append(ThreadPoolExecutor(*arguments))  # type: ignore[call-overload]
        return pools[-1]

    monkeypatch.setattr("mini_infer.modeling.weight_stream.ThreadPoolExecutor", watched)
    tensors = tensors_of([torch.float32])
    save_file(tensors, tmp_path / "model.safetensors")
    stream = stream_tensors(stored(tmp_path), places_for(tensors), Staging(16, 3, 2))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="shutdown"):
        pools[0].submit(print)


def test_nothing_to_load(tmp_path: Path) -> None:
    assert list(stream_tensors([], {})) == []


def test_a_header_lists_tensors_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    tensors = tensors_of(list(DTYPES.values()))
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert {tensor.name: tensor.shape for tensor in header} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    for before, after in pairwise(header):
        assert after.offset == before.offset + before.nbytes
    assert header[-1].offset + header[-1].nbytes == path.stat().st_size
    assert SafetensorsSource(tmp_path).names() == {tensor.name: None for tensor in header}.keys()


def test_integers_are_no_weights(tmp_path: Path) -> None:
    tensors = {"t0.qweight": torch.ones(2, 2, dtype=torch.int32)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    with pytest.raises(WeightsError, match=r"t0\.qweight in .* is stored as I32.*GGUF"):
        next(source.load_into(places_for(tensors, torch.float32)))


def test_a_header_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = json.dumps({"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes((len(text) + 1000).to_bytes(8, "little") + text + b"\0" * 4)
    with pytest.raises(WeightsError, match="truncated or corrupt"):
        read_header(path)
