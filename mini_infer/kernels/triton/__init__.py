"""Kernels in Triton, one file per family; imported only where a GPU runs them.

Each function has the arguments of its namesake in ``mini_infer.kernels.reference``;
``rotary_and_write_kv`` is three of those in one launch, ``decode_attention`` and
``draft_attention`` those and attention. ``sum_over_ranks`` is ``sum_of_parts`` of all ranks.
``draw`` and ``token_logprobs`` are what ``mini_infer.modeling.sampler`` does on a CPU.
"""

from mini_infer.kernels.triton.accept_drafts import accept_drafts_
from mini_infer.kernels.triton.activation import silu_and_mul
from mini_infer.kernels.triton.attention import paged_attention, short_rows
from mini_infer.kernels.triton.chunk_inputs import chunk_inputs
from mini_infer.kernels.triton.decode_inputs import decode_inputs
from mini_infer.kernels.triton.draft_attention import draft_attention, takes_drafts
from mini_infer.kernels.triton.draft_rows import last_samples, write_drafts_
from mini_infer.kernels.triton.embedding import embedding
from mini_infer.kernels.triton.flash_decoding import decode_attention
from mini_infer.kernels.triton.logprobs import token_logprobs
from mini_infer.kernels.triton.norm import rms_norm
from mini_infer.kernels.triton.one_shot_all_reduce import sum_over_ranks
from mini_infer.kernels.triton.publish import publish_
from mini_infer.kernels.triton.rotary import rotary_and_write_kv
from mini_infer.kernels.triton.sampling import draw
from mini_infer.kernels.triton.skinny import add_linear_, gated_linear, linear
from mini_infer.kernels.triton.skinny_plans import is_skinny
from mini_infer.kernels.triton.verify_inputs import verify_inputs

__all__ = [
    "accept_drafts_",
    "add_linear_",
    "chunk_inputs",
    "decode_attention",
    "decode_inputs",
    "draft_attention",
    "draw",
    "embedding",
    "gated_linear",
    "is_skinny",
    "last_samples",
    "linear",
    "paged_attention",
    "publish_",
    "rms_norm",
    "rotary_and_write_kv",
    "short_rows",
    "silu_and_mul",
    "sum_over_ranks",
    "takes_drafts",
    "token_logprobs",
    "verify_inputs",
    "write_drafts_",
]
