"""What a card would need at least for a workload: bytes over bandwidth, arithmetic over rate.

A step reads every weight once and the keys and values of every request in it, and multiplies each
token with the weights; it takes at least as long as the slower of the two (the roofline model,
Williams et al. 2009). In the last block, tokens whose logits nobody wants meet the projections of
keys and values only. A workload is its prompts as one step and then one step per output token.
Mixing prompts' arithmetic with decodes' reading could in theory beat this sum; no engine here does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from client import Job

from mini_infer.core.model_config import ModelConfig


@dataclass(frozen=True)
class Card:
    """What the processor reached in this run: see ``card.measure_card``."""

    name: str
    bytes_per_second: float
    """Read from its memory."""
    flops_per_second: float
    """Of a large bfloat16 matrix product, where an addition and a multiplication are two."""

    @property
    def summary(self) -> dict[str, float]:
        return {
            "read TB/s": round(self.bytes_per_second / 1e12, 3),
            "TFLOP/s": round(self.flops_per_second / 1e12, 1),
        }


@dataclass(frozen=True)
class ModelCost:
    """What a token costs in one model."""

    layer_parameters: int
    """Of the matrices between the embedding and the head."""
    last_token_parameters: int
    """Of these, what only tokens meet whose logits are wanted: the last block makes no more than
    keys and values of the others."""
    head_parameters: int
    """Of ``lm_head``: one row of it a request, not a token."""
    kv_values_per_token: int
    """Numbers that a token leaves in the caches of all layers."""
    flops_per_pair: int
    """Of one query token and one key token: scores and weighted values, over heads and layers."""
    bytes_per_value: int = 2

    @classmethod
    def of(cls, config: ModelConfig, bytes_per_value: int = 2) -> "ModelCost":
        hidden, heads = config.hidden_size, config.num_heads * config.head_dim
        kv_heads = config.num_kv_heads * config.head_dim
        attention = hidden * (2 * heads + 2 * kv_heads)
        mlp = 3 * hidden * config.intermediate_size
        return cls(
            layer_parameters=config.num_layers * (attention + mlp),
            last_token_parameters=2 * hidden * heads + mlp,
            head_parameters=hidden * config.vocab_size,
            kv_values_per_token=config.num_layers * config.kv_layout.bytes_per_token(1),
            flops_per_pair=4 * heads * config.num_layers,
            bytes_per_value=bytes_per_value,
        )

    @property
    def weight_bytes(self) -> int:
        """Read by every step. The embedding is not: a step looks up a few rows."""
        return (self.layer_parameters + self.head_parameters) * self.bytes_per_value


def step_seconds(card: Card, cost: ModelCost, rows: int, tokens: int, pairs: int, kv: int) -> float:
    """Seconds of one step.

    ``rows`` of logits, ``tokens`` computed, ``pairs`` of query and key tokens, ``kv`` tokens whose
    keys and values are read or written.
    """
    num_bytes = cost.weight_bytes + kv * cost.kv_values_per_token * cost.bytes_per_value
    flops = 2 * tokens * (cost.layer_parameters - cost.last_token_parameters)
    flops += 2 * rows * (cost.last_token_parameters + cost.head_parameters)
    flops += pairs * cost.flops_per_pair
    return max(num_bytes / card.bytes_per_second, flops / card.flops_per_second)


def workload_seconds(card: Card, cost: ModelCost, jobs: Sequence[Job], cached: int = 0) -> float:
    """Seconds of requests that all start together, each with its first ``cached`` tokens in KV."""
    prompts = [len(job.prompt_token_ids) for job in jobs]
    new = [length - cached for length in prompts]
    seconds = step_seconds(
        card,
        cost,
        rows=len(jobs),
        tokens=sum(new),
        pairs=sum(count * cached + count * (count + 1) // 2 for count in new),
        kv=sum(prompts),
    )
    for position in range(1, max(job.num_output_tokens for job in jobs)):
        contexts = [
            length + position
            for length, job in zip(prompts, jobs, strict=True)
            if job.num_output_tokens > position
        ]
        rows, kv = len(contexts), sum(contexts)
        seconds += step_seconds(card, cost, rows=rows, tokens=rows, pairs=kv, kv=kv)
    return seconds
