"""Sampling's operations in plain torch: each takes rows ``[R, V]`` and treats every row alone.

**Noise.** A token is drawn with the Gumbel-max trick (arXiv 1411.0030): add independent Gumbel
noise to each logit and take the argmax. The noise is a counter-based function (after Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) of (seed, position, token id) and of
nothing else, so a draw cannot depend on batch, chunking, preemption or the number of ranks.

The cheaper alternative, one uniform per row against the cumulative distribution, was rejected.
There every rounding error moves all later boundaries of the sum: over 50,000 near-equal tokens an
error of 1e-6 changes about one draw in twenty. Under Gumbel-max a draw changes with a probability
of at most twice the total-variation distance that the errors cause (arXiv 2408.07978), no sum over
the vocabulary is taken at all, and a shard of the vocabulary can draw its own noise.

**Ties.** Wherever tokens are ranked, equal logits rank by token id, lowest first.
"""

import functools

import torch
from torch import Tensor

_INT32_SIGN = 0x7FFF_FFFF
_LOW_32 = 0xFFFF_FFFF
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24
_GOLDEN_64 = 0x9E37_79B9_7F4A_7C15
NEG_INF = float("-inf")

REALS = ("temperature", "top_p", "log_min_p", "repetition", "presence", "frequency")
"""Columns of a slot's real parameters. Off is: 0 (greedy) for the temperature, infinity for top_p,
minus infinity for log_min_p."""
INTEGERS = ("seed", "num_prompt_tokens", "top_k")
"""Columns of its integers; the seed is mixed, top_k is 0 when off."""


def _signed(value: int, bits: int) -> int:
    """The two's complement reading of ``value``'s low ``bits`` bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _xor_shift_(x: Tensor, shift: int, bits: int) -> Tensor:
    """``x ^= x >>> shift`` in place; torch's ``>>`` drags the sign along, hence the mask."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (bits - shift)) - 1))


def splitmix64(value: int) -> int:
    """Mixes a 64-bit integer on the host (Steele et al., OOPSLA 2014). Returns a signed int64."""
    value = (value + _GOLDEN_64) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & (2**64 - 1)
    return _signed(value ^ (value >> 31), 64)


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys ``[R, 1]`` of (mixed seed, position), both ``[R]`` int64.

    ``seeds`` must have gone through :func:`splitmix64`, or the streams of neighbouring seeds
    could be shifted copies of each other.
    """
    key = seeds + positions * _signed(_GOLDEN_64, 64)
    _xor_shift_(key, 30, 64).mul_(_signed(0xBF58_476D_1CE4_E5B9, 64))
    _xor_shift_(key, 27, 64).mul_(_signed(0x94D0_49BB_1331_11EB, 64))
    halves = _xor_shift_(key, 31, 64).unsqueeze(1).view(torch.int32)  # [R, 2]
    return halves[:, :1], halves[:, 1:]


def token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """An int32 hash of each token id ``[V]``: the noise's third key, made once per model."""
    ids = torch.arange(1, vocab_size + 1, dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    return _hash32(ids, zero, zero)


def _hash32(tokens: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    """A 32-bit hash with three multiplications, one key before the first and one after it.

    The constants are Chris Wellons' ``triple32``, found by search for the lowest bias.
    """
    h = tokens ^ key0
    _xor_shift_(h, 17, 32).mul_(_signed(0xED5A_D4BB, 32)).add_(key1)
    _xor_shift_(h, 11, 32).mul_(_signed(0xAC4C_1B51, 32))
    _xor_shift_(h, 15, 32).mul_(_signed(0x3184_8BAB, 32))
    return _xor_shift_(h, 14, 32)


def negative_gumbel(tokens: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    """Minus standard Gumbel noise, float32: ``log(-log(1 - u))``.

    ``tokens`` holds token hashes, ``[V]`` or ``[R, K]``; the keys ``[R, 1]`` come from
    :func:`row_keys`. A large noise comes from a small ``u``, which is where floats are dense:
    31 random bits reach 22, and a token of probability 1e-9 is still drawn as often as it should.
    """
    u = _hash32(tokens, key0, key1).bitwise_and_(_INT32_SIGN).to(torch.float32)
    u.mul_(-(2.0**-31)).sub_(2.0**-32).clamp_min_(-_LARGEST_BELOW_ONE)
    return u.log1p_().neg_().log_()


def order_keys(logits: Tensor) -> Tensor:
    """Int64 keys ``[R, V]``, all different in a row, that sort as (logit, -token id) would.

    ``topk`` and ``sort`` promise no order among equals; with distinct keys there are none, and
    the first k do not depend on k, device or batch. NaN ranks beyond infinity, as in torch.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ (bits >> 31).bitwise_and_(_INT32_SIGN)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return ordered.long().bitwise_left_shift_(32).bitwise_or_(_LOW_32 - ids)


def top_tokens(logits: Tensor, k: int) -> Tensor:
    """Ids ``[R, k]`` of the k likeliest tokens, likeliest first, ties by token id."""
    keys = order_keys(logits)
    if k < logits.shape[-1]:
        best = keys.topk(k, dim=-1).values
    else:
        best = keys.sort(dim=-1, descending=True).values
    return _LOW_32 - best.bitwise_and_(_LOW_32)


def penalize_(
    logits: Tensor,
    tokens: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Penalties in place on ``logits [R, V]``: repetition (arXiv 1909.05858), then the OpenAI two.

    ``tokens [R, L]`` holds each row's ``num_tokens [R]`` tokens, prompt first, then anything.
    Repetition divides positive and multiplies negative logits of every token that stands;
    presence and frequency are subtracted for output tokens, once and per occurrence.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)
    stands = place < num_tokens[:, None]
    # Places beyond the row's end repeat its first token, whose entry they then rewrite unchanged.
    tokens = torch.where(stands, tokens, tokens[:, :1]).long()
    is_output = stands & (place >= num_prompt_tokens[:, None])
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    counts.scatter_add_(1, tokens, is_output.to(torch.int32))
    count = counts.gather(1, tokens)
    old = logits.gather(1, tokens)
    repetition = repetition[:, None]
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = new - frequency[:, None] * count - presence[:, None] * (count > 0)
    return logits.scatter_(1, tokens, new)


def mask_(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """Sets what grammars do not allow to -inf, in place in the ``rows [M]`` of ``logits [R, V]``.

    ``masks [M, ceil(V / 32)]`` int32 are the tokens allowed: ``t`` is bit ``t % 32`` of word
    ``t // 32``. The layout is xgrammar's and llguidance's.
    """
    forbidden = _forbidden_by_byte(logits.device)[masks.view(torch.uint8).int()]  # [M, bytes]
    forbidden = forbidden.view(torch.bool)[:, : logits.shape[-1]]
    if logits.is_cpu:
        for row, tokens in zip(rows.tolist(), forbidden, strict=True):
            logits[row].masked_fill_(tokens, NEG_INF)
        return logits
    return logits.index_copy_(0, rows, logits[rows].masked_fill_(forbidden, NEG_INF))


@functools.cache
def _forbidden_by_byte(device: torch.device) -> Tensor:
    """For each byte of a mask, its eight bits as eight bools that are one int64 ``[256]``."""
    bits = torch.arange(8, dtype=torch.uint8, device=device)
    byte = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    return ((byte >> bits & 1) == 0).view(torch.int64)[:, 0]


def ban_(logits: Tensor, token_ids: Tensor, active: Tensor) -> Tensor:
    """Sets ``token_ids [R, W]`` to -inf in place where ``active [R, W]``.

    A row that would be left without any token keeps its logits: a request goes on, at worst with
    a token it did not want, rather than failing half-way.
    """
    old = logits.gather(1, token_ids)
    # Padding repeats ids; min() with +inf leaves them alone whatever the order of the writes.
    verdict = torch.where(active, NEG_INF, float("inf")).to(logits.dtype)
    logits.scatter_reduce_(1, token_ids, verdict, "amin")
    empty = logits.amax(-1, keepdim=True) == NEG_INF
    return logits.scatter_(1, token_ids, torch.where(empty, old, logits.gather(1, token_ids)))


def mask_min_p_(logits: Tensor, log_min_p: Tensor) -> Tensor:
    """Drops, in place, tokens less likely than ``exp(log_min_p) [R]`` times the likeliest
    (arXiv 2407.01082). -inf drops none."""
    floor = logits.amax(-1) + log_min_p
    return logits.masked_fill_(logits < floor[:, None], NEG_INF)


def truncate(
    logits: Tensor, top_k: Tensor, top_p: Tensor, num_candidates: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k (arXiv 1805.04833), then top-p (arXiv 1904.09751) over what top-k left.

    Args:
        logits: ``[R, V]``, already divided by the temperature.
        top_k: ``[R]`` int64; 0 keeps all.
        top_p: ``[R]`` float64; infinity keeps all.
        num_candidates: how many of the likeliest tokens to look at, at least the largest top_k.

    Returns:
        ids and logits ``[R, num_candidates]``, likeliest first, with dropped tokens at -inf, and
        ``complete [R]``: whether no token beyond the candidates belongs to the row's set.
    """
    ids = top_tokens(logits, num_candidates)
    limited = top_k > 0
    rank = torch.arange(num_candidates, device=logits.device)
    dropped = (rank >= top_k[:, None]) & limited[:, None]
    probs = logits.softmax(-1).gather(1, ids).double().masked_fill_(dropped, 0.0)
    mass = probs.cumsum(-1)
    # Top-p counts in the distribution that top-k left; without top-k that is the whole one.
    target = torch.where(limited, mass[:, -1], 1.0) * top_p
    # The smallest set that reaches the mass: a token stays while those before it fall short.
    dropped |= mass - probs >= target[:, None]
    complete = limited | (mass[:, -1] >= target) | (num_candidates == logits.shape[-1])
    return ids, logits.gather(1, ids).masked_fill_(dropped, NEG_INF), complete
