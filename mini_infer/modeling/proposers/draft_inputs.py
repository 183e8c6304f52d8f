"""What a proposer's forward passes need: metadata of a token or two of each request."""

import torch
from torch import Tensor

from mini_infer.kernels import ops
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.device_state import DeviceState


def draft_metadata(
    state: DeviceState, slots: Tensor, first_positions: Tensor, num_tokens: int = 1
) -> tuple[Tensor, AttentionMetadata]:
    """Positions ``[R * num_tokens]`` and metadata of a pass over ``num_tokens`` tokens of each of R
    requests, from ``first_positions [R]`` on.

    Keys and values of tokens for which a request has no block go to the null block. A GPU may
    replay what this launches: it depends on no value of its arguments.
    """
    num_rows, device = len(slots), slots.device
    inputs = ops.verify_inputs(
        slots,
        first_positions,
        num_tokens,
        state.token_table,
        state.block_table,
        state.last_positions,
        state.kv_limits.view(-1),
        state.block_size,
        state.block_table.shape[1],
        state.null_block,
    )
    limit = state.token_table.shape[1]
    contexts = tuple(inputs.seqlens_k.tolist()) if slots.is_cpu else (limit,) * num_rows
    meta = AttentionMetadata(
        cu_seqlens_q=torch.arange(0, num_rows * num_tokens + 1, num_tokens, device=device),
        seqlens_k=inputs.seqlens_k,
        block_table=inputs.block_table,
        slot_mapping=inputs.slot_mapping,
        max_query_len=num_tokens,
        max_seqlen_k=max(contexts),
        query_lens=(num_tokens,) * num_rows,
        context_lens=contexts,
        backend=state.attention_backend,
    )
    return inputs.positions, meta
