"""A model whose layers are spread over stages says what one process says, token by token, in every
architecture and at every point of the lattice.

Ranks are threads here (``rank_threads.py``): ``test_mp_pipeline.py`` has the processes.
"""

import contextlib
import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.events import ChunkScheduled, DraftsVerified, Event, Preempted
from mini_infer.core.outputs import RequestOutput
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.grammar_requests import GrammarRequests
from tests.modeling.graphs_on_cpu import replay_graphs
from tests.runtime.engine_tools import run
from tests.runtime.rank_threads import sharded_engine
from tests.runtime.test_tensor_parallel import MODELS as TWO_LAYERS
from tests.runtime.test_tensor_parallel import PARAMS, PROMPTS, assert_same
from tests.runtime.tiny_model import tiny_engine

NUM_LAYERS = 5
MODELS = {
    name: replace(
        model,
        num_layers=NUM_LAYERS,
        sliding_layers=(True, False, True, True, False) if model.sliding_layers else (),
    )
    for name, model in TWO_LAYERS.items()
}
SIZES = ((2, 1), (3, 1), (2, 2), (5, 1), (3, 2))
"""Stages, and ranks in each."""
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, adaptive=False)


@functools.cache
def alone(model: str) -> tuple[RequestOutput, ...]:
    """Each request's output in one process, without company."""
    engine = tiny_engine(model_config=MODELS[model], enable_prefix_caching=False)
    outputs = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.add_request("0", prompt, params)
        outputs.append(run(engine)["0"])
    return tuple(outputs)


def pipeline(name: str, size: tuple[int, int], **options: object) -> LLMEngine:
    num_stages, stage_size = size
    options = {"depth": num_stages} | options
    return sharded_engine(
        model_config=MODELS[name],
        pipeline_parallel_size=num_stages,
        tensor_parallel_size=stage_size,
        **options,
    )


def check(engine: LLMEngine, name: str, order: Sequence[int]) -> list[Event]:
    """Runs these requests, of which the first comes late; returns what happened."""
    events: list[Event] = []
    engine.events.subscribe(events.append, DraftsVerified, Preempted, ChunkScheduled)
    for index in order[1:]:
        engine.add_request(str(index), PROMPTS[index], PARAMS[index])
    early = [delta.output for _ in range(3) for delta in engine.step() if delta.output]
    engine.add_request(str(order[0]), PROMPTS[order[0]], PARAMS[order[0]])
    outputs = run(engine) | {output.request_id: output for output in early}
    for index in order:
        assert_same(outputs[str(index)], alone(name)[index])
    engine.shutdown()
    return events


@pytest.mark.parametrize("size", [(2, 1), (3, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_every_architecture(name: str, size: tuple[int, int]) -> None:
    check(pipeline(name, size), name, range(len(PROMPTS)))


@settings(max_examples=10, deadline=None)
@given(
    name=st.sampled_from(list(MODELS)),
    size=st.sampled_from(SIZES),
    ngram=st.booleans(),
    chunk=st.sampled_from([5, 16, 256]),
    chunked=st.booleans(),
    caching=st.booleans(),
    block_size=st.sampled_from([1, 4, 16]),
    forced_preemption=st.booleans(),
    depth=st.sampled_from([1, 2, 3, 4]),
    order=st.permutations(range(len(PROMPTS))),
)
def test_outputs_are_identical_at_every_point(
    name: str,
    size: tuple[int, int],
    ngram: bool,
    chunk: int,
    chunked: bool,
    caching: bool,
    block_size: int,
    forced_preemption: bool,
    depth: int,
    order: list[int],
) -> None:
    chunked = chunked or chunk < 256
    engine = pipeline(
        name,
        size,
        speculative_config=NGRAM if ngram else None,
        max_num_batched_tokens=chunk,
        enable_chunked_prefill=chunked,
        max_num_seqs=min(8, chunk),
        enable_prefix_caching=caching,
        block_size=block_size,
        # 63 tokens: the longest request fits, two long ones do not.
        num_kv_blocks=(64 if forced_preemption else 1024) // block_size + forced_preemption,
        depth=depth,
    )
    check(engine, name, order)


@pytest.mark.parametrize("size", SIZES[:3])
def test_ngrams_have_drafts_verified(size: tuple[int, int]) -> None:
    engine = pipeline("llama", size, speculative_config=NGRAM)
    events = check(engine, "llama", range(len(PROMPTS)))
    assert any(isinstance(event, DraftsVerified) for event in events)


@pytest.mark.parametrize("ngram", [False, True])
@pytest.mark.parametrize("size", SIZES[1:3])
def test_stages_replay_graphs(
    size: tuple[int, int], ngram: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone("qwen2-tied")  # which has none
    replay_graphs(monkeypatch)
    options = {"speculative_config": NGRAM} if ngram else {}
    check(pipeline("qwen2-tied", size, **options), "qwen2-tied", range(len(PROMPTS)))


@pytest.mark.parametrize("seed", range(1, 3))
def test_aborted_requests_leave_their_slots_and_nothing_else(seed: int) -> None:
    """Their tokens are still on their way when others have their slots."""
    chance = random.Random(seed)
    engine = pipeline("llama", (3, 1), depth=4, max_num_seqs=2, max_num_batched_tokens=5)
    asked: dict[str, int] = {}
    outputs: dict[str, RequestOutput] = {}
    for number in range(30):
        asked[str(number)] = index = chance.randrange(len(PROMPTS))
        engine.add_request(str(number), PROMPTS[index], PARAMS[index])
        for _ in range(chance.randrange(4)):
            outputs |= {delta.request_id: delta.output for delta in engine.step() if delta.output}
        if chance.random() < 0.5 and (running := asked.keys() - outputs.keys()):
            aborted = chance.choice(sorted(running))
            engine.abort(aborted)
            del asked[aborted]
    outputs |= run(engine)
    for request_id, index in asked.items():
        assert_same(outputs[request_id], alone("llama")[index])
    engine.shutdown()


def test_masks_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes first. What their step would have sampled is still expected in the first stage,
    and must not be mistaken for what the next one does."""
    engine = pipeline("llama", (2, 1), depth=3)
    for index, params in enumerate(PARAMS):
        engine.add_request(str(index), PROMPTS[index], params)
    masks, calls = GrammarRequests.masks, itertools.count()

    def interrupted(self: GrammarRequests, batch: ScheduledBatch) -> bytearray:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return masks(self, batch)

    monkeypatch.setattr(GrammarRequests, "masks", interrupted)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        with contextlib.suppress(KeyboardInterrupt):
            outputs |= {delta.request_id: delta.output for delta in engine.step() if delta.output}
    assert next(calls) > 4
    for index, expected in enumerate(alone("llama")):
        assert_same(outputs[str(index)], expected)
    engine.shutdown()


def test_the_lattices_small_pool_does_preempt() -> None:
    engine = pipeline("llama", (2, 1), num_kv_blocks=17, block_size=4)
    events = check(engine, "llama", range(len(PROMPTS)))
    assert any(isinstance(event, Preempted) for event in events)
