"""What a proposer's forward passes need: metadata of a token or two of each request."""

import torch
from torch import Tensor

from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.device_state import DeviceState


def draft_metadata(
    state: DeviceState, slots: Tensor, last_positions: Tensor, num_tokens: int = 1
) -> tuple[Tensor, AttentionMetadata]:
    """Positions ``[R * num_tokens]`` and metadata of a pass over the last ``num_tokens`` tokens of
    each of R requests, up to ``last_positions [R]``.

    Keys and values of tokens for which a request has no block go to the null block. A GPU may
    replay what this launches: it depends on no value of its arguments.
    """
    num_rows, size, device = len(slots), state.block_size, slots.device
    back = torch.arange(1 - num_tokens, 1, device=device)
    positions = (last_positions[:, None] + back).clamp_min(0)  # [R, num_tokens]
    block_table = state.block_table[slots]
    blocks = block_table.gather(1, positions // size).long()
    exists = positions < state.kv_limits[slots]
    slot_mapping = torch.where(exists, blocks, state.null_block) * size + positions % size
    seqlens_k = last_positions + 1
    limit = state.token_table.shape[1]
    contexts = tuple(seqlens_k.tolist()) if slots.is_cpu else (limit,) * num_rows
    cu_seqlens_q = torch.arange(num_rows + 1, device=device) * num_tokens
    meta = AttentionMetadata(
        cu_seqlens_q=cu_seqlens_q,
        seqlens_k=seqlens_k,
        block_table=block_table,
        slot_mapping=slot_mapping.flatten(),
        max_query_len=num_tokens,
        max_seqlen_k=max(contexts),
        query_lens=(num_tokens,) * num_rows,
        context_lens=contexts,
        backend=state.attention_backend,
    )
    return positions.flatten(), meta
