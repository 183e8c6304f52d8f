"""Log-probabilities of tokens that stand, beside those of the likeliest ones."""

from dataclasses import dataclass

from torch import Tensor

from mini_infer.kernels import ops, sampling


@dataclass(frozen=True, slots=True)
class TokenLogprobTensors:
    """Log-probabilities of R tokens and of the K likeliest at the same places.

    ``ranks`` is 1 for the likeliest token. Where ``K`` exceeds what a row asked for, the reader
    trims; rows that asked for none hold zeros.
    """

    logprobs: Tensor  # [R] float32
    ranks: Tensor  # [R] int64
    top_token_ids: Tensor  # [R, K] int64, likeliest first
    top_logprobs: Tensor  # [R, K] float32


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobTensors:
    """Log-probabilities of ``token_ids [R]`` under raw ``logits [R, V]``, with the ``num_top``
    likeliest beside them. For a prompt's, ``token_ids`` are the tokens that its rows predict."""
    token_ids, num_top = token_ids.long(), min(num_top, logits.shape[-1])
    if ops.runs_kernels(logits):
        from mini_infer.kernels.triton.logprobs import token_logprobs as on_gpu

        return TokenLogprobTensors(*on_gpu(logits, token_ids, num_top))
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    top_ids = token_ids.new_empty(len(token_ids), 0)
    if num_top:
        top_ids = sampling.top_tokens(logprobs, num_top)
    ranks = (logprobs > chosen).sum(-1) + 1
    return TokenLogprobTensors(chosen[:, 0], ranks, top_ids, logprobs.gather(1, top_ids))
