"""A draft model keeps in step with its requests, and changes nothing that they get.

A draft model that equals its target is right about every token, unless its keys and values are not
those of the tokens before: so every draft must be accepted.
"""

import functools
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer.core.events import Event, Preempted
from mini_infer.core.model_config import ModelConfig
from mini_infer.core.outputs import RequestOutput
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.modeling import model_runner
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.kernel_warm_up import TILED_ROW, rehearse
from mini_infer.modeling.model_files import ModelFiles, locate_model
from mini_infer.modeling.model_runner import ModelRunner
from mini_infer.modeling.proposers import draft_model
from mini_infer.modeling.proposers.draft_model import DraftModelProposer, load_draft_model
from mini_infer.modeling.proposers.load import load_device_proposer
from mini_infer.modeling.proposers.proposer import DraftRows
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.llm import LLM
from mini_infer.runtime.speculation.controller import DraftController
from tests.modeling.graphs_on_cpu import replay_graphs
from tests.runtime.engine_tools import generate, run
from tests.runtime.fake_executor import TINY_MODEL, make_config
from tests.runtime.tiny_model import tiny_engine

PROMPTS = [
    [random.Random(seed).randrange(256) for _ in range(length)]
    for seed, length in enumerate([5, 33, 18, 1, 50])
]
PROMPTS.append(PROMPTS[1][:20] + PROMPTS[2])  # shares a prefix
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=20, ignore_eos=True)
PARAMS = [
    GREEDY,
    SAMPLED,
    SamplingParams(temperature=1.2, seed=2, max_tokens=15, ignore_eos=True),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=9),
    SamplingParams(temperature=0.7, top_k=20, min_p=0.02, seed=3, max_tokens=14),
    GREEDY,
]
SMALLER = replace(TINY_MODEL, num_layers=1)


@pytest.fixture(autouse=True)
def draft_model_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights come from a configuration and a seed, the target's."""
    nothing = ModelFiles(Path("unused"), Path("unused"))
    monkeypatch.setattr(
        draft_model, "locate_model", lambda m: nothing if m == "tiny" else locate_model(m)
    )


def drafting(model: ModelConfig = TINY_MODEL, num_drafts: int = 3, **options: Any) -> Any:
    return SpeculativeConfig(
        method="draft_model",
        model="tiny",
        model_config=model,
        num_speculative_tokens=num_drafts,
        adaptive=False,
        on_device=True,
        **options,
    )


def outputs_of(
    engine: LLMEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
) -> list[RequestOutput]:
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    outputs = run(engine)
    return [outputs[str(index)] for index in range(len(prompts))]


def counts(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    """Drafts that were verified, and accepted, of all requests."""
    drafts = [output.metrics.drafts for output in outputs]
    known = [each for each in drafts if each is not None]
    return (
        sum(each.num_draft_tokens for each in known),
        sum(each.num_accepted_tokens for each in known),
    )


@functools.cache
def alone() -> tuple[tuple[int, ...], ...]:
    """Without drafts, batch, chunks or cache."""
    options: dict[str, Any] = {"enable_prefix_caching": False, "max_num_batched_tokens": 256}
    return tuple(
        tuple(generate(tiny_engine(**options), [prompt], params)[0])
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    )


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [7, 64])
def test_a_draft_model_that_is_the_target_is_always_right(
    params: SamplingParams, depth: int, chunk: int
) -> None:
    engine = tiny_engine(
        speculative_config=drafting(), depth=depth, max_num_batched_tokens=chunk, max_num_seqs=4
    )
    proposed, accepted = counts(outputs_of(engine, PROMPTS, params))
    # A budget of seven tokens leaves little room for drafts.
    assert proposed == accepted > (10 if chunk == 7 else 60)


@pytest.mark.parametrize(
    ("depth", "caching", "num_blocks", "num_drafts"),
    [(1, False, 256, 1), (1, True, 18, 4), (2, True, 256, 4), (2, False, 18, 2)],
)
def test_any_other_changes_nothing(
    depth: int, caching: bool, num_blocks: int, num_drafts: int
) -> None:
    engine = tiny_engine(
        speculative_config=drafting(SMALLER, num_drafts),
        depth=depth,
        enable_prefix_caching=caching,
        num_kv_blocks=num_blocks,
        max_num_batched_tokens=32,
    )
    for _ in range(2):  # the second time from the cache, if there is one
        assert [tuple(o) for o in generate(engine, PROMPTS, PARAMS)] == list(alone())


def test_preempted_requests_are_caught_up() -> None:
    engine = tiny_engine(
        speculative_config=drafting(), num_kv_blocks=18, enable_prefix_caching=False
    )
    events: list[Event] = []
    engine.events.subscribe(events.append)
    proposed, accepted = counts(outputs_of(engine, PROMPTS, GREEDY))
    assert any(isinstance(event, Preempted) for event in events)
    assert proposed == accepted > 20


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], bool]], None]:
    """Has drafts on in steps of which a function of their number says so."""

    def install(is_on: Callable[[int], bool]) -> None:
        num_steps = 0

        def num_drafts(self: DraftController, *_: int) -> int:
            nonlocal num_steps
            num_steps += 1
            return 3 if is_on(num_steps) else 0

        monkeypatch.setattr(DraftController, "num_drafts", num_drafts)

    return install


@pytest.mark.parametrize(
    ("params", "period"), [(GREEDY, 2), (SAMPLED, 3)], ids=["greedy", "sampled"]
)
def test_what_passed_while_drafts_were_off_is_caught_up(
    params: SamplingParams, period: int, switch: Callable[[Callable[[int], bool]], None]
) -> None:
    switch(lambda step: step // period % 2 == 1)
    engine = tiny_engine(speculative_config=drafting(), max_num_batched_tokens=32)
    proposed, accepted = counts(outputs_of(engine, PROMPTS, params))
    assert proposed == accepted > 20


def test_at_depth_two_a_switch_costs_next_to_no_draft(
    switch: Callable[[Callable[[int], bool]], None],
) -> None:
    """Where the host does not know how many drafts were accepted, a token may be missed."""
    switch(lambda step: step % 5 > 1)
    engine = tiny_engine(speculative_config=drafting(), depth=2)
    outputs = outputs_of(engine, PROMPTS, GREEDY)
    proposed, accepted = counts(outputs)
    assert accepted > 0.95 * proposed > 40
    plain = outputs_of(tiny_engine(), PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]


@pytest.mark.parametrize("depth", [1, 2])
def test_in_graphs(
    depth: int,
    switch: Callable[[Callable[[int], bool]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where drafts stand, only the device knows; what it missed is still computed in time."""
    plain = outputs_of(tiny_engine(), PROMPTS, SAMPLED)
    replay_graphs(monkeypatch)
    switch(lambda step: step % 6 > 1)
    engine = tiny_engine(speculative_config=drafting(), depth=depth)
    outputs = outputs_of(engine, PROMPTS, SAMPLED)
    proposed, accepted = counts(outputs)
    assert accepted > 0.95 * proposed > 40
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]


def test_cached_blocks_that_it_never_saw_are_caught_up(
    switch: Callable[[Callable[[int], bool]], None],
) -> None:
    is_on = False
    switch(lambda step: is_on)
    engine = tiny_engine(speculative_config=drafting())
    first = outputs_of(engine, PROMPTS, GREEDY)
    assert counts(first) == (0, 0)
    is_on = True
    again = outputs_of(engine, PROMPTS, GREEDY)
    assert sum(output.num_cached_tokens for output in again) > 60
    proposed, accepted = counts(again)
    assert proposed == accepted > 60
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in first]


def test_it_may_be_of_any_architecture() -> None:
    qwen = replace(TINY_MODEL, architecture="Qwen3ForCausalLM", head_dim=16, num_kv_heads=1)
    engine = tiny_engine(speculative_config=drafting(qwen))
    assert [tuple(o) for o in generate(engine, PROMPTS, PARAMS)] == list(alone())


@pytest.mark.parametrize("surplus", [-9, 40])
def test_only_tokens_of_both_models_are_drafts(
    surplus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of one vocabulary may be padded to different sizes."""
    target_size = TINY_MODEL.vocab_size
    other = replace(TINY_MODEL, vocab_size=target_size + surplus)
    config = make_config(speculative_config=drafting(other))
    state = DeviceState(config, torch.device("cpu"))
    state.set_null_block(4)
    model = load_draft_model(config)
    assert model is not None
    compute_logits = model.compute_logits
    # Ids beyond the target's are what it would say, if it could.
    beyond = torch.arange(other.vocab_size) >= target_size
    monkeypatch.setattr(model, "compute_logits", lambda x: compute_logits(x) + 1000.0 * beyond)
    rows = DraftRows(
        slots=torch.tensor([0, 1]),
        positions=torch.tensor([1, 3]),
        token_ids=torch.tensor([target_size - 1, 0]),  # the first may be none of the draft's
        hidden=torch.zeros(2, TINY_MODEL.hidden_size),
    )
    with torch.inference_mode():
        drafts = DraftModelProposer(config, model, 5, state).propose(rows, 4)
    assert drafts.shape == (2, 4)
    assert drafts.dtype == torch.int64
    assert int(drafts.max()) < min(target_size, other.vocab_size)
    engine = tiny_engine(speculative_config=drafting(other))
    assert [tuple(o) for o in generate(engine, PROMPTS, PARAMS)] == list(alone())


def test_prompts_that_it_follows_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers may launch other kernels than the target's."""
    nothing = ModelFiles(Path("unused"), Path("unused"))
    runner = ModelRunner(make_config(speculative_config=drafting(SMALLER)), nothing)
    runner.load()
    followed: set[tuple[int, ...]] = set()
    forward = DraftModelProposer._forward

    def noted(self: DraftModelProposer, *step: Any) -> torch.Tensor:
        followed.add(step[2].query_lens)
        return forward(self, *step)

    monkeypatch.setattr(DraftModelProposer, "_forward", noted)
    with torch.inference_mode():
        rehearse(runner)
    # The largest step's, one beside short rows, and passes of one token and two.
    assert followed > {(1,), (TILED_ROW, 1), (64,)}


def test_a_profiles_proposer_is_gone_before_the_next_takes_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head's weights would be there twice, in memory that the profile gave to the cache."""
    nothing = ModelFiles(Path("unused"), Path("unused"))
    runner = ModelRunner(make_config(speculative_config=drafting()), nothing)
    runner.load()
    runner.init_cache(1)
    profiled = weakref.ref(runner.proposer)
    load = load_device_proposer

    def load_alone(*target: Any) -> Any:
        assert profiled() is None
        return load(*target)

    monkeypatch.setattr(model_runner, "load_device_proposer", load_alone)
    runner.init_cache(8)
    assert runner.proposer is not None


def test_it_drafts_up_to_the_end_of_the_context() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True)
    options: dict[str, Any] = {"max_model_len": 20, "block_size": 4, "num_kv_blocks": 5}
    engine = tiny_engine(speculative_config=drafting(num_drafts=8), **options)
    (output,) = outputs_of(engine, [PROMPTS[0]], params)
    assert len(output.outputs[0].token_ids) == 15
    assert generate(tiny_engine(**options), [PROMPTS[0]], params) == [output.outputs[0].token_ids]
    proposed, accepted = counts([output])
    assert proposed == accepted > 8


@pytest.mark.parametrize("kind", ["folder", "gguf", "dummy"])
def test_from_files(kind: str, tiny_folder: Path, tiny_gguf: Path) -> None:
    draft = tiny_gguf if kind == "gguf" else tiny_folder
    options: dict[str, Any] = {
        "model": str(tiny_folder),
        "dtype": "float32",
        "device": "cpu",
        "load_format": "dummy" if kind == "dummy" else "safetensors",
        "num_kv_blocks": 64,
    }
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    with LLM(**options) as plain:
        (expected,) = plain.generate([prompt], GREEDY, use_tqdm=False)
    speculation = {"model": str(draft), "num_speculative_tokens": 3, "adaptive": False}
    with LLM(**options, speculative_config=speculation) as llm:
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    proposed, accepted = counts([output])
    assert proposed == accepted > 8
