"""How many KV blocks fit beside everything else that a GPU has to hold: measured, not guessed.

The largest steps that the scheduler can ask for run once, through the same code as any other, and a
few graphs are recorded; what they took is left free. vLLM sizes its cache the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mini_infer.core.batch import Admission, Chunk, ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import OutOfMemoryError
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import MAX_SPECULATING_ROWS, SpeculativeConfig
from mini_infer.modeling.kv_memory import bytes_per_block

if TYPE_CHECKING:
    from mini_infer.modeling.model_runner import ModelRunner

logger = logging.getLogger(__name__)

SLACK = 256 * 2**20
"""Left free for what no profile sees: fragments between the allocator's blocks."""

DEMANDING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    allowed_token_ids=[0, 1, 2],
    logprobs=20,
)
"""Everything that takes memory in a step, but what one of its rows is asked about its prompt."""


def num_blocks_beside_steps(runner: ModelRunner) -> int:
    """KV blocks for ``gpu_memory_utilization``, once weights are loaded.

    Raises:
        OutOfMemoryError: not even one block is left.
    """
    config = runner.config
    num_layers = len(runner.model.layers)
    size = bytes_per_block(config, runner.model.kv_layout, runner.dtype, num_layers)
    runner.init_cache(1)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    graph_bytes = _graph_bytes(runner)
    step_bytes = _step_bytes(runner)
    runner.caches = []
    torch.cuda.empty_cache()
    others = total - free
    limit = int(total * config.gpu_memory_utilization)
    left = limit - others - graph_bytes - step_bytes - SLACK
    demand = config.max_num_seqs * config.max_blocks_per_request
    count = min(left // size - 1, demand)  # one more belongs to the graphs' surplus rows
    gib = 2**30
    logger.info(
        "GPU memory %.1f GiB, of which %.1f held, %.2f for the largest step, %.2f for graphs: "
        "%d KV blocks of %d tokens",
        *(total / gib, others / gib, step_bytes / gib, graph_bytes / gib),
        *(count, config.block_size),
    )
    if count < 1:
        raise OutOfMemoryError(
            f"no memory is left for a KV cache: {others / gib:.1f} of {total / gib:.1f} GiB are "
            f"held by weights and other programs, steps and graphs take "
            f"{(step_bytes + graph_bytes) / gib:.1f}: raise gpu_memory_utilization "
            f"({config.gpu_memory_utilization}), lower max_num_seqs or max_num_batched_tokens, or "
            f"use a smaller model"
        )
    return count


def _graph_bytes(runner: ModelRunner) -> int:
    """Of all graphs: the largest hold the memory that they share, each further one its own."""
    if not runner.has_graphs:
        return 0
    with _MemoryTaken() as taken:
        graphs = runner.new_graphs()
        graphs.capture_largest()
    total = taken.num_bytes
    for capture, count in graphs.further():
        with _MemoryTaken() as taken:
            capture()
        total += count * taken.num_bytes
    del graphs, capture
    torch.cuda.empty_cache()
    return total


class _MemoryTaken:
    """Bytes of a GPU that are taken within, but for what torch only keeps for later."""

    num_bytes = 0

    def __enter__(self) -> _MemoryTaken:
        self._before, _ = torch.cuda.mem_get_info()
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.empty_cache()  # of what was launched before each recording: steps count that
        after, _ = torch.cuda.mem_get_info()
        self.num_bytes = max(0, self._before - after)


def _step_bytes(runner: ModelRunner) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    for batch in largest_steps(runner.config):
        runner.execute(batch).result()
    return torch.cuda.max_memory_reserved() - before


def largest_steps(config: EngineConfig) -> Iterator[ScheduledBatch]:
    """Whatever a step holds, one of these holds as much of it."""
    yield largest_step(config)
    if config.speculative_config is not None:
        yield from largest_verification(config, config.speculative_config)


def largest_step(config: EngineConfig) -> ScheduledBatch:
    """As many rows and tokens as a step can have, at the far end of the context, and each row with
    every option that takes memory."""
    num_rows = min(config.max_num_seqs, config.max_step_tokens)
    length = min(config.max_step_tokens // num_rows, config.max_model_len - 1)
    longest = min(config.max_step_tokens - (num_rows - 1) * length, config.max_model_len - 1)
    lengths = [longest] + [length] * (num_rows - 1)
    starts = [config.max_model_len - 1 - length for length in lengths]
    return _demanding_step(config, lengths, starts)


def largest_verification(
    config: EngineConfig, speculation: SpeculativeConfig
) -> Iterator[ScheduledBatch]:
    """As many rows and drafts as a step can verify, if it can any: a row of logits for each."""
    num_rows = min(MAX_SPECULATING_ROWS, config.max_num_seqs, config.max_step_tokens // 2)
    if not num_rows:
        return
    most = config.max_step_tokens // num_rows - 1
    num_drafts = min(speculation.num_speculative_tokens, most)
    lengths, starts = [1 + num_drafts] * num_rows, [config.max_model_len - 2] * num_rows
    batch = _demanding_step(config, lengths, starts)
    drafts = (0,) * num_drafts
    yield replace(
        batch,
        chunks=tuple(
            chunk._replace(
                num_drafts=num_drafts,
                draft_token_ids=drafts,
                num_proposed=num_drafts if speculation.on_device else 0,
            )
            for chunk in batch.chunks
        ),
    )


def _demanding_step(
    config: EngineConfig, lengths: Sequence[int], starts: Sequence[int]
) -> ScheduledBatch:
    """Rows with every option that takes memory, the longest first. It alone is asked about its
    prompt: prompts are looked at one by one, in memory that the next one takes over, and 256 of
    them are a thousand launches."""
    batch = step_of_prompts(config, lengths, DEMANDING, starts, stop_token_ids=(0,))
    longest, *others = batch.admissions
    asked = replace(longest.params, prompt_logprobs=longest.params.logprobs)
    return replace(batch, admissions=(replace(longest, params=asked), *others))


def step_of_prompts(
    config: EngineConfig,
    lengths: Sequence[int],
    params: SamplingParams,
    starts: Sequence[int] | None = None,
    stop_token_ids: tuple[int, ...] = (),
) -> ScheduledBatch:
    """A step of whole prompts of these lengths, or of their last tokens from ``starts`` on, each
    sampled.

    What they compute is of no interest: tables hold nought at first, so that all tokens are token 0
    and all rows share block 0.
    """
    rows = list(enumerate(zip(starts or [0] * len(lengths), lengths, strict=True)))
    return ScheduledBatch(
        step_id=-1,
        chunks=tuple(
            Chunk(str(slot), slot, start, length, (0,) * -(-length // config.block_size))
            for slot, (start, length) in rows
        ),
        admissions=tuple(
            Admission(str(slot), slot, (0,) * length, start + length, params, 0, stop_token_ids)
            for slot, (start, length) in rows
        ),
    )
