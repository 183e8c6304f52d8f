"""One row at a time, in Python floats and integers: what the sampler must agree with."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mini_infer.core.batch import Admission
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.modeling.sampler import Sampler, SampleResult
from mini_infer.modeling.sampling_state import SamplingState

CPU = torch.device("cpu")
MASK_32, MASK_64 = 2**32 - 1, 2**64 - 1


def admit(
    slot: int,
    params: SamplingParams,
    tokens: Sequence[int] = (0,),
    num_prompt_tokens: int | None = None,
    seed: int = 0,
    **extra: Any,
) -> Admission:
    num_prompt = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    return Admission(f"r{slot}", slot, tuple(tokens), num_prompt, params, seed, **extra)


def run(logits: Tensor, admissions: Sequence[Admission], state: SamplingState) -> SampleResult:
    """Samples one row per admission, which must be in ``state`` already."""
    longest = max(len(admission.token_ids) for admission in admissions)
    # Whatever stands behind a row's end must not matter: fill it with a valid id.
    table = torch.full((state.num_slots, longest + 1), 1, dtype=torch.int32)
    for admission in admissions:
        table[admission.slot, : len(admission.token_ids)] = torch.tensor(admission.token_ids)
    slots = [admission.slot for admission in admissions]
    lengths = [len(admission.token_ids) for admission in admissions]
    return Sampler()(logits, slots, lengths, table, state)


def sample(logits: Tensor, admissions: Sequence[Admission]) -> SampleResult:
    """Samples in a fresh state."""
    num_slots = max(admission.slot for admission in admissions) + 1
    state = SamplingState(num_slots, logits.shape[1], CPU)
    for admission in admissions:
        state.admit([admission])
    return run(logits, admissions, state)


def sample_many(logits: Sequence[float], params: SamplingParams, n: int, seed: int = 1) -> Tensor:
    """``n`` draws of one request at ``n`` positions of its output, all after the same prompt."""
    state = SamplingState(1, len(logits), CPU)
    state.admit([admit(0, params, seed=seed)])
    table = torch.zeros(1, n + 1, dtype=torch.int32)
    rows = torch.tensor(logits).expand(n, -1)
    return Sampler()(rows, [0] * n, list(range(1, n + 1)), table, state).token_ids


def gumbel(seed: int, position: int, token_id: int) -> float:
    key = _finalise((seed + 0x9E3779B97F4A7C15) & MASK_64)
    key = _finalise((key + position * 0x9E3779B97F4A7C15) & MASK_64)
    token = _hash32(token_id + 1, 0, 0)
    bits = _hash32(token, key & MASK_32, key >> 32) & (2**31 - 1)
    return -math.log(-math.log1p(-(bits + 0.5) / 2**31))


def acceptable(logits: Sequence[float], admission: Admission) -> set[int]:
    """Ids that may be sampled: one, unless rounding could decide between two."""
    params, tokens = admission.params, admission.token_ids
    scores = _edited(list(logits), admission)
    if params.temperature < 1e-5:
        return _best(scores)
    scores = [score / params.temperature for score in scores]
    noise = [gumbel(admission.seed, len(tokens), i) for i in range(len(scores))]
    ids: set[int] = set()
    for slack in (-1e-6, 1e-6):
        kept = _kept(scores, params, slack)
        noisy = [scores[i] + noise[i] if i in kept else -math.inf for i in range(len(scores))]
        ids |= _best(noisy)
    return ids


def _best(scores: list[float]) -> set[int]:
    """The argmax; near-equal scores all count, but exactly equal ones only lowest id first."""
    best = max(scores)
    if best == -math.inf:
        return {0}
    near = [i for i, score in enumerate(scores) if score >= best - 1e-4 * max(1.0, abs(best))]
    return {i for i in near if all(scores[j] != scores[i] for j in near if j < i)}


def _edited(scores: list[float], admission: Admission) -> list[float]:
    params, tokens = admission.params, list(admission.token_ids)
    output = tokens[admission.num_prompt_tokens :]
    for token in set(tokens):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        scores = [s if i in allowed else -math.inf for i, s in enumerate(scores)]
    banned = {word[-1] for word in admission.bad_words_token_ids if _ends_with(tokens, word[:-1])}
    if len(output) < params.min_tokens:
        banned |= set(admission.stop_token_ids)
    without = [-math.inf if i in banned else s for i, s in enumerate(scores)]
    return scores if max(without) == -math.inf else without


def _ends_with(tokens: list[int], tail: Sequence[int]) -> bool:
    return len(tokens) >= len(tail) and tokens[len(tokens) - len(tail) :] == list(tail)


def _kept(scores: list[float], params: SamplingParams, slack: float) -> set[int]:
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = [math.exp(scores[i] - scores[order[0]]) for i in order]
    kept, before = [], 0.0
    for i, weight in zip(order, weights, strict=True):
        if params.top_p < 1.0 and before >= (params.top_p + slack) * sum(weights):
            break
        kept.append(i)
        before += weight
    if params.min_p > 0.0:
        floor = scores[order[0]] + math.log(params.min_p) + slack
        kept = [i for i in kept if scores[i] >= floor]
    return set(kept) | {order[0]}


def _finalise(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def _hash32(h: int, key0: int, key1: int) -> int:
    h ^= key0
    h = ((h ^ (h >> 17)) * 0xED5AD4BB + key1) & MASK_32
    h = ((h ^ (h >> 11)) * 0xAC4C1B51) & MASK_32
    h = ((h ^ (h >> 15)) * 0x31848BAB) & MASK_32
    return h ^ (h >> 14)
