"""What steps with drafts take on this device, measured once at start-up.

How many drafts pay depends on it alone and on their acceptance: a step that reads all weights for
one token of a request verifies a few more almost for nothing, until the device computes longer than
it reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from mini_infer.core.batch import Admission, Chunk, ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import MAX_SPECULATING_ROWS
from mini_infer.core.step_costs import StepCosts
from mini_infer.modeling.proposers.proposer import DraftRows
from mini_infer.modeling.speculative_graphs import ShapedGraphs, smallest

if TYPE_CHECKING:
    from mini_infer.modeling.model_runner import ModelRunner
    from mini_infer.modeling.step_graphs import StepGraphs

ROWS = (1, 4, 16, MAX_SPECULATING_ROWS)
"""Requests of the steps that are measured; those between are interpolated."""
REPLAYS = 4
LONG = 1024
CONTEXT = 128
"""Tokens of a request, in steps that are replayed and in those that are launched."""
MOST_SECONDS = 0.5
"""After which launched steps of more requests are left out, and extrapolated."""
LONG_RUN = 0.03
"""Seconds of a step that is not launched again to be sure."""


def measure_step_costs(runner: ModelRunner) -> StepCosts | None:
    """Times steps without drafts and with them, once the cache and all graphs are there; None where
    nobody will ask. What they compute leaves no trace."""
    speculation = runner.config.speculative_config
    if speculation is None or not speculation.adaptive:
        return None
    most = min(runner.config.max_num_seqs, runner.config.max_step_tokens)
    rows = tuple(sorted({min(count, most) for count in ROWS}))
    if runner.graphs is not None and not runner.config.is_pipelined:
        return _of_replays(runner, runner.graphs, rows)
    return _of_launches(runner, rows, speculation.num_speculative_tokens)


@torch.inference_mode()
def _of_replays(runner: ModelRunner, graphs: StepGraphs, rows: tuple[int, ...]) -> StepCosts:
    """Steps of nobody's rows, whose context is the null block over and over."""
    config, nobody, sampled = runner.config, runner.state.null_slot, graphs.proposals.sampled
    assert config.speculative_config is not None
    counts, context = config.speculative_config.draft_counts, min(LONG, config.max_model_len - 1)
    sampled.places[sampled.nobodys] = context
    verify, propose = [], []
    for num_rows in rows:
        slots, starts, zeros = [nobody] * num_rows, [context] * num_rows, [0] * num_rows
        end = slots, zeros, [sampled.nobodys] * num_rows
        accepting = _replay_seconds(graphs.proposals, num_rows, 0, *end)
        seconds = [_device_seconds(graphs.decodes.for_nobody(starts))]
        proposing = [0.0]
        for count in counts[1:]:
            took = _replay_seconds(graphs.verifications, num_rows, count, slots, starts)
            seconds.append(accepting + took)
            took = _replay_seconds(graphs.proposals, num_rows, count, *end)
            proposing.append(max(0.0, took - accepting))
        verify.append(tuple(seconds))
        propose.append(tuple(proposing))
    sampled.places[sampled.nobodys] = 0
    return StepCosts(rows, counts, tuple(verify), tuple(propose))


def _replay_seconds(
    graphs: ShapedGraphs, num_rows: int, num_drafts: int, *columns: list[int]
) -> float:
    """0 where the drafts are the host's: then no graph proposes any."""
    shape = smallest(graphs.shapes, num_rows, num_drafts)
    return 0.0 if shape is None else _device_seconds(partial(graphs.replay, shape, *columns))


def _device_seconds(replay: Callable[[], None]) -> float:
    """Of one replay among several that follow each other."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    replay()
    begin.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / REPLAYS


def _of_launches(runner: ModelRunner, rows: tuple[int, ...], most_drafts: int) -> StepCosts:
    """Steps are measured as the runner runs them, with no drafts, with one, and with most; none of
    more tokens than a step may have, for which nobody has room."""
    config = runner.config
    context = min(CONTEXT, config.max_model_len - 1)
    most_drafts = min(most_drafts, config.max_step_tokens - 1)
    most_rows = config.max_step_tokens // (1 + most_drafts)
    rows = tuple(sorted({min(count, most_rows) for count in rows}))
    counts = tuple(sorted({0, min(1, most_drafts), most_drafts}))
    verify: list[tuple[float, ...]] = []
    propose: list[tuple[float, ...]] = []
    slowest = runner.slowest
    begin = time.perf_counter()
    for num_rows in rows:
        if len(verify) >= 2 and slowest(time.perf_counter() - begin) > MOST_SECONDS:
            break
        runner.execute(_admissions(config, num_rows, context)).result()
        batches = [_verification(num_rows, context, count) for count in counts]
        seconds = [_seconds(partial(_run, runner, batch), slowest) for batch in batches]
        propose_so_many = partial(_propose, runner, num_rows, context)
        proposing = [_seconds(partial(propose_so_many, count), slowest) for count in counts[1:]]
        verify.append(tuple(seconds))
        propose.append((0.0, *proposing))
    _clean(runner)
    return StepCosts(rows[: len(verify)], counts, tuple(verify), tuple(propose))


def _seconds(work: Callable[[], None], slowest: Callable[[float], float]) -> float:
    """The least of a few runs, or of one that takes long; of each, what the ``slowest`` rank took,
    so that all ranks go on together."""
    times: list[float] = []
    while len(times) < 3 and sum(times) < LONG_RUN:
        begin = time.perf_counter()
        work()
        times.append(slowest(time.perf_counter() - begin))
    return min(times)


def _run(runner: ModelRunner, batch: ScheduledBatch) -> None:
    runner.execute(batch).result()


@torch.inference_mode()
def _propose(runner: ModelRunner, num_rows: int, context: int, num_drafts: int) -> None:
    if runner.proposer is None:
        return
    slots = torch.arange(num_rows, device=runner.device)
    hidden_size = runner.config.model_config.hidden_size
    hidden = torch.zeros(num_rows, hidden_size, dtype=runner.dtype, device=runner.device)
    rows = DraftRows(slots, torch.full_like(slots, context), torch.zeros_like(slots), hidden)
    runner.proposer.propose(rows, num_drafts).cpu()


def _admissions(config: EngineConfig, num_rows: int, context: int) -> ScheduledBatch:
    """Takes in requests of ``context`` tokens, all of them in block 0, and computes the last."""
    tokens = config.max_model_len + config.max_drafts_ahead
    blocks = (0,) * -(-tokens // config.block_size)
    token_ids, params = (0,) * context, SamplingParams()
    return ScheduledBatch(
        step_id=-1,
        chunks=tuple(Chunk(str(slot), slot, context - 1, 1) for slot in range(num_rows)),
        admissions=tuple(
            Admission(str(slot), slot, token_ids, context, params, 0, block_ids=blocks)
            for slot in range(num_rows)
        ),
    )


def _verification(num_rows: int, context: int, num_drafts: int) -> ScheduledBatch:
    """A step of their last tokens with so many drafts behind each."""
    drafts = num_drafts, (0,) * num_drafts
    chunks = (
        Chunk(str(slot), slot, context - 1, 1 + num_drafts, (), True, *drafts)
        for slot in range(num_rows)
    )
    return ScheduledBatch(step_id=-1, chunks=tuple(chunks))


def _clean(runner: ModelRunner) -> None:
    """No request was ever here."""
    state = runner.state
    for table in (state.token_table, state.last_positions, state.kv_limits):
        table.zero_()
    state.block_table[: state.null_slot].zero_()
    state.params_by_slot.clear()
    state.num_prompt_tokens.clear()
    for caches in runner.caches:
        for cache in caches:
            cache[0].zero_()
