"""What the GPU figures are held against: the project's own bars, and other engines.

The other engines' figures were measured on 2026-11-30 on one NVIDIA H200 (torch 2.11.0+cu130,
triton 3.6.0), each through its own offline API, with random bfloat16 weights, fixed output lengths
and the same workloads. They hold for that kind of card only.
"""

from dataclasses import dataclass, field

CARD = "H200"
"""Bars and peers are shown only for a card of this name."""
VLLM, NANO_VLLM = "vLLM 0.22.0", "nano-vllm"


@dataclass(frozen=True)
class Reference:
    """Of one model, by workload: tok/s; of a "first token", milliseconds."""

    bars: dict[str, float] = field(default_factory=dict)
    peers: dict[str, dict[str, float]] = field(default_factory=dict)


NO_REFERENCE = Reference()
REFERENCES = {
    "qwen2.5-7b": Reference(
        bars={
            "batch 1": 280,
            "batch 8": 1700,
            "batch 32": 4800,
            "batch 128": 8000,
            "mixed 256": 13000,
            "prefill": 47000,
            "context 3800": 260,
            "first token, cold": 44,
            "first token, cached": 5,
        },
        peers={
            VLLM: {
                "batch 1": 207.6,
                "batch 8": 1425,
                "batch 32": 4024,
                "batch 128": 6901,
                "context 3800": 188.5,
                "mixed 256": 11737,
                "prefill": 46600,
                "first token, cold": 46,
                "first token, cached": 9,
            }
        },
    ),
    "qwen3-0.6b": Reference(
        bars={"batch 1": 1900, "batch 8": 9000, "batch 128": 28000, "mixed 256": 28000},
        peers={
            NANO_VLLM: {
                "batch 1": 430,
                "batch 8": 3391,
                "batch 32": 10506,
                "batch 128": 20133,
                "mixed 256": 19390,
            },
            VLLM: {
                "batch 1": 599,
                "batch 8": 4530,
                "batch 32": 12600,
                "batch 128": 22222,
                "mixed 256": 23076,
                "prefill": 372000,
            },
        },
    ),
    "qwen2.5-1.5b": Reference(
        peers={
            VLLM: {
                "batch 1": 461.8,
                "batch 8": 3186,
                "batch 32": 8754,
                "batch 128": 14713,
                "context 3800": 436.7,
                "mixed 256": 23630,
                "prefill": 200000,
                # It was 13 to 20 ms; the faster one is what there is to beat.
                "first token, cold": 13,
                "first token, cached": 7,
            }
        },
    ),
}
SHARED_PREFIX_FALL = 85.0
"""Time to first token with a shared 2,048-token prefix, in %."""
CONCURRENCY_GAIN = 7.0
"""Throughput from 1 to 8 requests at a time."""
KV_WASTE = 4.0
"""Tokens in allocated blocks that nothing uses, in %, at most."""
