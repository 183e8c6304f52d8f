"""The FlashAttention packages' adapter, against stand-ins that check their arguments as the real
functions do and compute by the reference, from nothing but those arguments."""

import importlib
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from mini_infer.core.errors import InvalidConfigError
from mini_infer.kernels import flash_attention, reference
from mini_infer.kernels.flash_attention import check_available
from mini_infer.kernels.metadata import AttentionMetadata
from tests.kernels.paged_batches import PagedBatch, Shape, paged_batch

AMPERE, HOPPER, BLACKWELL, TURING = (8, 0), (9, 0), (10, 0), (7, 5)
SHAPE = Shape(num_heads=4, num_kv_heads=2, head_dim=16, block_size=256)
STEPS = {
    "one decode": ([1], [300]),
    "decodes": ([1, 1, 1], [3, 600, 256]),
    "drafts": ([3, 3], [257, 12]),
    "chunks beside decodes": ([1, 20, 3], [520, 40, 66]),
}
Calls = list[str]


def by_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: tuple[Tensor, Tensor],
    scale: float,
    window: tuple[int, int] | tuple[None, None],
) -> Tensor:
    """``lengths``: cumulative queries, contexts."""
    cumulative, contexts = lengths
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dtype == k.dtype == v.dtype
    assert all(x.stride(-1) == 1 for x in (q, k, v, table))
    assert all(x.dtype == torch.int32 for x in (table, *lengths))
    assert all(x.is_contiguous() for x in lengths)
    assert k.shape == v.shape
    assert len(table) == len(contexts) == len(cumulative) - 1
    assert window[1] in (None, -1, 0)
    meta = AttentionMetadata(
        cumulative, contexts, table, contexts, 0, 0, (), tuple(contexts.tolist())
    )
    span = None if window[0] is None or window[0] < 0 else window[0] + 1
    return reference.paged_attention(q, k, v, meta, scale, span)


def version_2(calls: Calls) -> ModuleType:
    """flash-attn 2.8: pages of a multiple of 256 tokens."""

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: Literal[True],
        window_size: tuple[int, int],
        block_table: Tensor,
    ) -> Tensor:
        calls.append("varlen")
        assert causal
        contexts = cu_seqlens_k.diff().contiguous()
        assert k.shape[1] % 256 == 0
        assert cu_seqlens_k[0] == 0
        assert cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q >= cu_seqlens_q.diff().max()
        assert max_seqlen_k >= contexts.max()
        lengths = cu_seqlens_q, contexts
        return by_reference(q, k, v, block_table, lengths, softmax_scale, window_size)

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: Literal[True],
        window_size: tuple[int, int],
    ) -> Tensor:
        calls.append("kvcache")
        assert causal
        assert k_cache.shape[1] % 256 == 0
        rows, length = q.shape[:2]
        lengths = (
            torch.arange(0, (rows + 1) * length, length, dtype=torch.int32),
            cache_seqlens,
        )
        out = by_reference(
            q.flatten(0, 1), k_cache, v_cache, block_table, lengths, softmax_scale, window_size
        )
        return out.view(q.shape)

    return module(flash_attn_varlen_func, flash_attn_with_kvcache)


def version_3(calls: Calls) -> ModuleType:
    """flash_attn_3: its varlen function knows no pages, this one takes any rows."""

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor,
        page_table: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: Literal[True],
        window_size: tuple[int, int],
    ) -> Tensor:
        calls.append("kvcache")
        assert causal
        assert max_seqlen_q >= cu_seqlens_q.diff().max()
        lengths = cu_seqlens_q, cache_seqlens
        return by_reference(q, k_cache, v_cache, page_table, lengths, softmax_scale, window_size)

    return module(flash_attn_with_kvcache)


def version_4(calls: Calls) -> ModuleType:
    """flash-attn-4: no window is None, and log-sum-exps come along, as None."""

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_k: Tensor,
        page_table: Tensor,
        softmax_scale: float,
        causal: Literal[True],
        window_size: tuple[int, int] | tuple[None, None],
        num_splits: int,
    ) -> tuple[Tensor, None]:
        calls.append(f"{num_splits=}")
        assert causal
        assert max_seqlen_q >= cu_seqlens_q.diff().max()
        assert max_seqlen_k >= seqused_k.max()
        assert -1 not in window_size
        lengths = cu_seqlens_q, seqused_k
        return by_reference(q, k, v, page_table, lengths, softmax_scale, window_size), None

    return module(flash_attn_varlen_func)


def module(*functions: Any) -> ModuleType:
    made = ModuleType("stand_in")
    for function in functions:
        setattr(made, function.__name__, function)
    return made


STAND_INS = {
    2: ("flash_attn.flash_attn_interface", version_2),
    3: ("flash_attn_interface", version_3),
    4: ("flash_attn.cute", version_4),
}


class Machine:
    """What is installed, and on which device; what was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Calls = []
        self._monkeypatch = monkeypatch

    def install(self, *versions: int, capability: tuple[int, int] = HOPPER) -> None:
        for version, (name, make) in STAND_INS.items():
            made = make(self.calls) if version in versions else None  # None: not to be found
            self._monkeypatch.setitem(sys.modules, name, made)
        self._monkeypatch.setattr(flash_attention, "device_capability", lambda device: capability)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    flash_attention.choose.cache_clear()
    yield Machine(monkeypatch)
    flash_attention.choose.cache_clear()


def half_precision(batch: PagedBatch, dtype: torch.dtype = torch.float16) -> PagedBatch:
    """In a dtype that the packages take, and in a GPU's memory layout: heads before tokens."""
    memory = torch.stack((batch.k_cache, batch.v_cache), dim=1).transpose(2, 3).to(dtype)
    k_cache, v_cache = memory.contiguous().transpose(2, 3).unbind(1)
    return replace(batch, q=batch.q.to(dtype), k_cache=k_cache, v_cache=v_cache)


def attend(batch: PagedBatch, window: int | None = None) -> Tensor:
    return flash_attention.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.meta, batch.scale, window
    )


@pytest.mark.parametrize("version", STAND_INS)
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("window", [None, 1, 30])
def test_every_version_gets_the_whole_step(
    machine: Machine, version: int, lengths: tuple[list[int], list[int]], window: int | None
) -> None:
    machine.install(version)
    batch = half_precision(paged_batch(*lengths, SHAPE))
    expected = reference.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.meta, batch.scale, window
    )
    assert torch.equal(attend(batch, window), expected)
    assert len(machine.calls) == 1


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("block_size", [1, 16])
def test_small_blocks(machine: Machine, version: int, block_size: int) -> None:
    machine.install(version)
    shape = replace(SHAPE, block_size=block_size)
    batch = half_precision(paged_batch([1, 20, 3], [33, 40, 66], shape), torch.bfloat16)
    expected = reference.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.meta, batch.scale
    )
    assert torch.equal(attend(batch), expected)


@pytest.mark.parametrize("version", STAND_INS)
def test_lengths_of_another_integer_type(machine: Machine, version: int) -> None:
    machine.install(version)
    batch = half_precision(paged_batch(*STEPS["chunks beside decodes"], SHAPE))
    names = ("cu_seqlens_q", "seqlens_k", "block_table")
    wide = replace(batch.meta, **{name: getattr(batch.meta, name).long() for name in names})
    assert torch.equal(attend(replace(batch, meta=wide)), attend(batch))


def test_version_2_takes_a_graphs_word_for_its_lengths(machine: Machine) -> None:
    """A graph of chunks says how long rows may be; how long they are stands on the device."""
    machine.install(2)
    batch = half_precision(paged_batch([3, 1, 2], [40, 9, 2], SHAPE))
    meta = replace(batch.meta, query_lens=(1, 1, 2), max_query_len=3, max_seqlen_k=1000)
    assert torch.equal(attend(replace(batch, meta=meta)), attend(batch))


def test_version_2_splits_the_contexts_of_uniform_steps(machine: Machine) -> None:
    machine.install(2)
    for lengths in STEPS.values():
        attend(half_precision(paged_batch(*lengths, SHAPE)))
    assert machine.calls == ["kvcache", "kvcache", "kvcache", "varlen"]


@pytest.mark.parametrize(("capability", "num_splits"), [(HOPPER, 1), (BLACKWELL, 0)])
def test_version_4_splits_contexts_where_it_can(
    machine: Machine, capability: tuple[int, int], num_splits: int
) -> None:
    machine.install(4, capability=capability)
    attend(half_precision(paged_batch([1], [300], SHAPE)))
    assert machine.calls == [f"{num_splits=}"]


@pytest.mark.parametrize(
    ("capability", "installed", "chosen"),
    [
        (HOPPER, (2, 3, 4), "FlashAttention 3"),
        (HOPPER, (2, 4), "FlashAttention 4"),
        (HOPPER, (2,), "FlashAttention 2"),
        (BLACKWELL, (2, 3, 4), "FlashAttention 4"),
        (BLACKWELL, (2, 3), "FlashAttention 2"),
        ((12, 0), (2, 3, 4), "FlashAttention 2"),
        (AMPERE, (2, 3, 4), "FlashAttention 2"),
    ],
)
def test_which_version(
    machine: Machine, capability: tuple[int, int], installed: tuple[int, ...], chosen: str
) -> None:
    machine.install(*installed)
    assert flash_attention.choose(capability, 256, 128)[0].name == chosen


def test_larger_heads_take_an_older_version(machine: Machine) -> None:
    machine.install(2, 4)
    assert flash_attention.choose(BLACKWELL, 256, 256)[0].name == "FlashAttention 2"


@pytest.mark.parametrize(
    ("installed", "arguments", "says"),
    [
        ((), (HOPPER, 16, 128, "bfloat16"), "pip install 'flash-attn-4"),
        ((), (AMPERE, 16, 128, "bfloat16"), "pip install flash-attn --no-build-isolation"),
        ((), (TURING, 16, 128, "float16"), "compute capability 7.5"),
        ((2,), (AMPERE, 16, 128, "bfloat16"), "give block_size 256"),
        ((4,), (BLACKWELL, 16, 256, "bfloat16"), "heads of a multiple of 8 up to 128"),
        ((2,), (AMPERE, 256, 20, "bfloat16"), "this model's have 20"),
        ((3, 4), (AMPERE, 16, 128, "bfloat16"), "no paged attention for compute capability 8.x"),
        ((3,), (HOPPER, 16, 128, "float32"), "not in float32"),
    ],
)
def test_what_is_in_the_way_is_said(
    machine: Machine, installed: tuple[int, ...], arguments: Any, says: str
) -> None:
    machine.install(*installed)
    with pytest.raises(InvalidConfigError, match="attention_backend 'flash_attn'") as caught:
        check_available(*arguments)
    assert says in str(caught.value)
    assert "leave attention_backend at auto" in str(caught.value)


def test_what_works_is_silent(machine: Machine) -> None:
    machine.install(3)
    check_available(HOPPER, 16, 128, "bfloat16")


def test_a_package_that_does_not_load_is_told_from_one_that_is_missing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.install()
    real = importlib.import_module

    def load(name: str) -> ModuleType:
        if name == "flash_attn_interface":
            raise ImportError("undefined symbol: aten")
        if name == "flash_attn.cute":
            raise ModuleNotFoundError("No module named 'cutlass'", name="cutlass")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", load)
    with pytest.raises(InvalidConfigError) as caught:
        check_available(HOPPER, 16, 128, "bfloat16")
    assert "FlashAttention 3 is installed but does not load: undefined symbol" in str(caught.value)
    assert "FlashAttention 4 is installed but does not load: No module named" in str(caught.value)
