"""Speculation where not all goes well: steps that raise, before or behind their work, and requests
that are aborted with drafts in flight. Whoever is left says what it says alone."""

import random
from pathlib import Path
from typing import Any

import pytest

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.outputs import RequestOutput
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.executor import MaskedStepHandle
from tests.modeling.graphs_on_cpu import replay_graphs
from tests.runtime.engine_tools import run, step
from tests.runtime.test_speculation_lattice import (
    MOST,
    PARAMS,
    PROMPTS,
    alone,
    assert_same,
    head_folder,
    moody,
    speculation,
)
from tests.runtime.tiny_model import tiny_engine

__all__ = ["head_folder"]  # a fixture of this module, too


class FailsAtTheEnd:
    """A step handle whose step runs, and then raises."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        if isinstance(handle, MaskedStepHandle):
            self.sample = handle.sample

    def result(self) -> None:
        self._handle.result()
        raise RuntimeError("a fault, as told")


def make_faulty(engine: Any, die: random.Random) -> list[int]:
    """Lets some steps raise, in either way; returns their ids as they do."""
    executor = engine.core.executor
    submit, failed = executor.submit, []

    def submit_or_fail(batch: ScheduledBatch) -> Any:
        if die.random() < 0.15 and len(batch.chunks) > 1:  # a request alone would be blamed
            failed.append(batch.step_id)
            if die.random() < 0.5:
                raise RuntimeError("a fault, as told")
            return FailsAtTheEnd(submit(batch))
        return submit(batch)

    executor.submit = submit_or_fail
    return failed


@pytest.mark.parametrize(
    ("method", "graphs", "seed"),
    [("MixedOnHost", False, 3), ("MixedOnDevice", True, 4), ("same_draft_model", True, 5)],
)
def test_who_is_left_says_what_it_says_alone(
    method: str, graphs: bool, seed: int, head_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone()
    die = random.Random(seed)
    config = speculation(method, head_folder, MOST, adaptive=False)
    if graphs:
        replay_graphs(monkeypatch)
    moody(monkeypatch, config)
    engine = tiny_engine(
        speculative_config=config,
        depth=2,
        num_kv_blocks=40,
        max_num_seqs=4,
        max_num_batched_tokens=48,
    )
    failed = make_faulty(engine, random.Random(seed))
    order = die.sample(range(len(PROMPTS)), len(PROMPTS))
    outputs: dict[str, RequestOutput] = {}
    for turn, index in enumerate(order):
        engine.add_request(str(index), PROMPTS[index], PARAMS[index])
        name = f"aborted {turn}"
        engine.add_request(name, PROMPTS[index], SamplingParams(max_tokens=40, ignore_eos=True))
        for _ in range(die.randrange(5)):
            outputs |= {d.request_id: d.output for d in step(engine) if d.output is not None}
        engine.abort(name)
    outputs |= run(engine)
    assert failed
    for index in order:
        assert_same(outputs[str(index)], alone()[index])
