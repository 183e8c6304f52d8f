"""Paged attention by the FlashAttention packages, versions 2, 3 and 4, whichever is installed.

They take our caches as they are: ``[num_blocks, block_size, Hkv, D]``, any strides but the last,
and a block table. What differs is the name of the function, of its arguments, and what each cannot
do. Papers: arXiv 2205.14135, 2307.08691, 2407.08608.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from mini_infer.core.errors import InvalidConfigError
from mini_infer.kernels.metadata import AttentionMetadata

DTYPES = ("float16", "bfloat16")
PAGE_MULTIPLE = 256
"""FlashAttention 2 checks that its pages are whole multiples of this many tokens."""

Capability = tuple[int, int]
Attend = Callable[
    [ModuleType, Tensor, Tensor, Tensor, AttentionMetadata, float, int | None], Tensor
]


@dataclass(frozen=True)
class Package:
    """One version of FlashAttention: where it is, what it can do, how it is called."""

    name: str
    module: str
    majors: tuple[int, ...]
    """Compute capabilities, by major number, on which it attends over pages."""
    max_head_dim: int
    page_multiple: int
    attend: Attend

    def obstacle(self, capability: Capability, block_size: int, head_dim: int) -> str | None:
        """Why it can't be used here, and which option to change; None if it can."""
        if capability[0] not in self.majors:
            return f"{self.name} has no paged attention for compute capability {capability[0]}.x"
        if head_dim % 8 or head_dim > self.max_head_dim:
            return (
                f"{self.name} attends over pages with heads of a multiple of 8 up to "
                f"{self.max_head_dim}, this model's have {head_dim}"
            )
        if block_size % self.page_multiple:
            return (
                f"{self.name} needs blocks of a multiple of {self.page_multiple} tokens, got "
                f"{block_size}: give block_size {self.page_multiple}"
            )
        return None


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """See ``reference.paged_attention``. ``check_available`` says beforehand whether it works.

    Raises:
        InvalidConfigError: it does not.
    """
    package, module = choose(device_capability(q.device), k_cache.shape[1], q.shape[2])
    return package.attend(module, q, k_cache, v_cache, meta, scale, sliding_window)


def check_available(capability: Capability, block_size: int, head_dim: int, dtype: str) -> None:
    """Can ``attention_backend='flash_attn'`` run a model of such heads on a device of this compute
    capability? ``dtype`` is an option's value.

    Raises:
        InvalidConfigError: no; says which package or option would change that.
    """
    if dtype not in DTYPES:
        raise InvalidConfigError(
            f"attention_backend 'flash_attn' computes in {' or '.join(DTYPES)}, not in {dtype}: "
            f"give another dtype, or leave attention_backend at auto"
        )
    choose(capability, block_size, head_dim)


@functools.cache
def choose(capability: Capability, block_size: int, head_dim: int) -> tuple[Package, ModuleType]:
    """The first package by ``preference`` that is installed and fits, imported.

    Raises:
        InvalidConfigError: there is none.
    """
    obstacles = []
    for package in preference(capability):
        try:
            module = importlib.import_module(package.module)
        except (ImportError, OSError) as error:  # OSError: a library that it links to is missing
            if not _is_absent(package, error):
                obstacles.append(f"{package.name} is installed but does not load: {error}")
            continue
        obstacle = package.obstacle(capability, block_size, head_dim)
        if obstacle is None:
            return package, module
        obstacles.append(obstacle)
    raise InvalidConfigError(
        f"attention_backend 'flash_attn' can't be used: "
        f"{'; '.join(obstacles) or _how_to_install(capability)}; or leave attention_backend at auto"
    )


def preference(capability: Capability) -> tuple[Package, ...]:
    """The newest first. But version 4 can't split contexts on Hopper, which leaves most of the card
    idle in a small decode step, so version 3 comes before it there."""
    if capability[0] == 9:
        return VERSION_3, VERSION_4, VERSION_2
    return VERSION_4, VERSION_3, VERSION_2


@functools.cache
def device_capability(device: torch.device) -> Capability:
    """Major and minor compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def _is_absent(package: Package, error: Exception) -> bool:
    """Is it the package that is not there, rather than one that it needs?"""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return name is not None and (package.module == name or package.module.startswith(f"{name}."))


def _how_to_install(capability: Capability) -> str:
    if capability[0] in VERSION_4.majors:
        return (
            "no FlashAttention is installed: pip install 'flash-attn-4>=4.0.0b5', which this "
            "device can run with every block_size"
        )
    if capability[0] in VERSION_2.majors:
        return (
            "no FlashAttention is installed: pip install flash-attn --no-build-isolation, and give "
            f"block_size {PAGE_MULTIPLE}"
        )
    return f"no FlashAttention attends on compute capability {capability[0]}.{capability[1]}"


def _attend_2(
    module: ModuleType,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
) -> Tensor:
    num_rows = len(meta.seqlens_k)
    options = {
        "block_table": meta.block_table.int(),
        "softmax_scale": scale,
        "causal": True,
        "window_size": (-1, -1) if window is None else (window - 1, 0),
    }
    out: Tensor
    if min(meta.query_lens) == meta.max_query_len:  # a uniform step: this function splits contexts
        rows = q.view(num_rows, meta.max_query_len, *q.shape[1:])
        out = module.flash_attn_with_kvcache(
            rows, k_cache, v_cache, cache_seqlens=meta.seqlens_k.int(), **options
        )
        return out.flatten(0, 1)
    ends = meta.seqlens_k.cumsum(0, dtype=torch.int32)
    out = module.flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=meta.cu_seqlens_q.int(),
        cu_seqlens_k=torch.nn.functional.pad(ends, (1, 0)),
        max_seqlen_q=meta.max_query_len,
        max_seqlen_k=meta.max_seqlen_k,
        **options,
    )
    return out


def _attend_3(
    module: ModuleType,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
) -> Tensor:
    out: Tensor = module.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=meta.seqlens_k.int(),
        page_table=meta.block_table.int(),
        cu_seqlens_q=meta.cu_seqlens_q.int(),
        max_seqlen_q=meta.max_query_len,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
    return out


def _attend_4(
    module: ModuleType,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
) -> Tensor:
    out: Tensor
    out, _ = module.flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=meta.cu_seqlens_q.int(),
        max_seqlen_q=meta.max_query_len,
        max_seqlen_k=meta.max_seqlen_k,
        seqused_k=meta.seqlens_k.int(),
        page_table=meta.block_table.int(),
        softmax_scale=scale,
        causal=True,
        window_size=(None, None) if window is None else (window - 1, 0),
        num_splits=1 if device_capability(q.device)[0] == 9 else 0,  # 0: as many as it finds best
    )
    return out


VERSION_2 = Package(
    "FlashAttention 2",
    "flash_attn.flash_attn_interface",
    (8, 9, 10, 11, 12),
    256,
    PAGE_MULTIPLE,
    _attend_2,
)
VERSION_3 = Package("FlashAttention 3", "flash_attn_interface", (9,), 256, 1, _attend_3)
VERSION_4 = Package("FlashAttention 4", "flash_attn.cute", (9, 10, 11), 128, 1, _attend_4)
