"""Every kernel that steps will launch, compiled before the first step: side by side, in seconds.

Which kernels those are is nobody's list. Steps of every kind run once, with launches that only note
what they would launch (``kernels/triton/compile_ahead.py``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.kernels import ops
from mini_infer.modeling.memory_profile import largest_steps, step_of_prompts
from mini_infer.modeling.proposers.proposer import FollowingProposer
from mini_infer.modeling.step_result import MaskedStep

if TYPE_CHECKING:
    from mini_infer.modeling.model_runner import ModelRunner

TILED_ROW = 20
"""Tokens of a row that attention tiles, and does not split."""
MIDDLE_PROMPTS = (256, 1024)
"""Tokens of prompts too short for attention to give each processor two programs: the shorter one is
split. The largest step is neither."""


def compile_kernels(runner: ModelRunner) -> None:
    """Compiles what the steps of ``runner`` launch, once its weights are there."""
    if runner.device.type == "cuda" and ops.gpu_kernels() is not None:
        from mini_infer.kernels.triton.compile_ahead import compile_ahead

        with compile_ahead():
            rehearse(runner)


def rehearse(runner: ModelRunner) -> None:
    """Runs steps that launch everything there is to launch, on a cache of one block."""
    runner.init_cache(1)
    with _one_layer_of_each_kind(runner):
        # First what takes longest to compile: attention's largest tiles, and all of the sampler.
        _rehearse_launched(runner)
        if runner.has_graphs:
            runner.new_graphs().rehearse()
    runner.caches = []


def _rehearse_launched(runner: ModelRunner) -> None:
    config = runner.config
    longest = min(config.max_step_tokens, config.max_model_len - 1)
    middle = sorted({min(length, longest) for length in MIDDLE_PROMPTS})
    prompts = (
        *(step_of_prompts(config, [length], SamplingParams()) for length in middle),
        small_step(config, (1,)),
        *_mixed_steps(runner),
    )
    for batch in (*largest_steps(config), *prompts):
        runner.execute(batch).result()
    if isinstance(runner.proposer, FollowingProposer):  # it computes them with layers of its own
        for batch in prompts:
            chunks = tuple(chunk._replace(samples=False) for chunk in batch.chunks)
            runner.execute(replace(batch, chunks=chunks)).result()
    masked = runner.execute(replace(small_step(config, (1,)), masked=(0,)))
    assert isinstance(masked, MaskedStep)
    masked.sample(bytearray((config.model_config.vocab_size + 31) // 32 * 4))
    masked.result()


def _mixed_steps(runner: ModelRunner) -> Iterator[ScheduledBatch]:
    """A chunk beside short rows, once for each kernel that attention has for those, be it the
    target's or a draft model's."""
    kernels, config = ops.gpu_kernels(), runner.config
    if kernels is None:
        return
    drafts = config.speculative_config.model_config if config.speculative_config else None
    pairs = {
        pair: None
        for model in (runner.model.config, drafts)
        if model is not None
        for pair in kernels.short_rows(
            model.num_heads,
            model.kv_layout.num_kv_heads,
            model.kv_layout.head_dim * runner.dtype.itemsize,
            config.max_num_seqs - 1,
            runner.device,
        )
    }
    for longest, count in pairs:
        yield small_step(config, (TILED_ROW, longest, *[1] * (count - 1)))


@contextmanager
def _one_layer_of_each_kind(runner: ModelRunner) -> Iterator[None]:
    """Within, the model has no two layers that launch the same kernels: a rehearsal of all would
    take seconds. But it has its last one, which computes the tokens that are wanted only."""
    model, sizes, layers = runner.model, runner.config.model_config, runner.model.layers
    kinds: dict[Hashable, int] = {}
    for depth, layer in enumerate(layers):
        shapes = tuple((name, weight.shape) for name, weight in layer.named_parameters())
        window = sizes.layer_sliding_window(model.stage.layers[depth])
        kinds.setdefault((window, shapes), depth)
    depths = sorted({*kinds.values(), len(layers) - 1})
    model.layers = nn.ModuleList(layers[depth] for depth in depths)
    runner.caches = [runner.caches[depth] for depth in depths]
    try:
        yield
    finally:
        model.layers = layers


def small_step(config: EngineConfig, lengths: Sequence[int]) -> ScheduledBatch:
    """Short prompts, sampled plainly; or fewer and shorter ones, where limits are narrow."""
    num_rows = min(len(lengths), config.max_num_seqs, config.max_step_tokens)
    longest, rows = config.max_model_len - 1, lengths[-num_rows:]
    if sum(rows) > config.max_step_tokens:
        longest = min(longest, config.max_step_tokens // num_rows)
    fitting = [min(length, longest) for length in rows]
    return step_of_prompts(config, fitting, SamplingParams())
