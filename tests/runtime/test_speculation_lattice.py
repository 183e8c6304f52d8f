"""Speculation changes nothing: a tiny random float32 model's tokens and log-probabilities are those
of plain decoding, whoever proposes, at every point of the lattice.

The oracle is the same model without speculation, batching, chunking, caching or preemption.
"""

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.events import DraftsVerified, Event, Preempted
from mini_infer.core.outputs import RequestOutput
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.core.step_costs import StepCosts
from mini_infer.core.structured_outputs import StructuredOutputsParams
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.proposers import draft_model
from mini_infer.modeling.proposers.head import DraftHead
from mini_infer.modeling.proposers.head_files import save_draft_head
from mini_infer.modeling.proposers.proposer import DraftRows
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.local_executor import LocalExecutor
from mini_infer.runtime.speculation.controller import DraftController
from mini_infer.runtime.speculation.host_drafts import HostDrafts
from tests.modeling.graphs_on_cpu import replay_graphs
from tests.runtime.engine_tools import run
from tests.runtime.fake_executor import TINY_MODEL, VOCAB_SIZE
from tests.runtime.tiny_model import tiny_engine

MOST = 4
PROMPTS = [
    [random.Random(seed).randrange(256) for _ in range(length)]
    for seed, length in enumerate([5, 33, 18, 1, 30])
]
PROMPTS.append(PROMPTS[1][:20] + PROMPTS[2])  # shares a prefix
PROMPTS.append(PROMPTS[1])  # the same again
PROMPTS += [[7, 8, 9] * 6, PROMPTS[0], PROMPTS[4][:16]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=16, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=11, max_tokens=12, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, seed=3, max_tokens=14),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.3, max_tokens=12),
    SamplingParams(temperature=1.0, seed=5, presence_penalty=0.5, min_p=0.02, max_tokens=9),
    SamplingParams(temperature=0.0, min_tokens=6, max_tokens=12, logit_bias={65: 3.0, 257: 9.0}),
    SamplingParams(temperature=0.0, max_tokens=20, bad_words=["ab", "\x07"], prompt_logprobs=1),
    SamplingParams(
        temperature=0.8,
        seed=8,
        max_tokens=30,
        logprobs=1,
        structured_outputs=StructuredOutputsParams(regex="[a-c]{3}(-[0-9]{2}){1,4}"),
    ),
    SamplingParams(temperature=0.3, seed=21, max_tokens=15, stop_token_ids=list(range(0, 250, 9))),
    SamplingParams(
        temperature=0.0,
        max_tokens=20,
        structured_outputs=StructuredOutputsParams(choice=["first", "second", "third é"]),
    ),
]


class KnownTexts:
    """Drafts that are right, wrong, or both by turns."""

    kind = "right"

    def drafts(self, text: Sequence[int], start: int, num_drafts: int) -> list[int]:
        """Behind the first ``start`` tokens of ``text``."""
        right = list(text[start : start + num_drafts])
        if self.kind == "right":
            return right
        die = random.Random(start)
        wrong = [die.randrange(VOCAB_SIZE) for _ in range(num_drafts)]
        if self.kind == "wrong":
            return wrong
        num_right = die.randrange(num_drafts + 1)
        return (right[:num_right] + wrong)[: die.randrange(num_drafts + 1)]


class RightOnHost(KnownTexts):
    def __init__(self, config: SpeculativeConfig) -> None:
        pass

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[list[int]]:
        return [
            self.drafts(texts()[int(request.request_id)], len(request.token_ids), num_drafts)
            for request in requests
        ]


class WrongOnHost(RightOnHost):
    kind = "wrong"


class MixedOnHost(RightOnHost):
    kind = "mixed"


class RightOnDevice(KnownTexts):
    """Finds each request by its tokens so far."""

    on_device = True

    def __init__(
        self, config: EngineConfig, model: CausalLM, caches: object, state: DeviceState
    ) -> None:
        self._state = state

    def propose(self, rows: DraftRows, num_drafts: int) -> Tensor:
        drafts = []
        for slot, position in zip(rows.slots.tolist(), rows.positions.tolist(), strict=True):
            known = self._state.token_table[slot, : position + 1].tolist()
            text = next((text for text in texts() if text[: len(known)] == known), [])
            found = self.drafts(text, len(known), num_drafts)
            drafts.append((found + [position % 256] * num_drafts)[:num_drafts])
        return torch.tensor(drafts).reshape(-1, num_drafts)


class WrongOnDevice(RightOnDevice):
    kind = "wrong"


class MixedOnDevice(RightOnDevice):
    kind = "mixed"


@functools.cache
def alone() -> tuple[RequestOutput, ...]:
    """Each request's output without speculation, and without company."""
    outputs = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine = tiny_engine(enable_prefix_caching=False, max_num_batched_tokens=256, block_size=16)
        engine.add_request("0", prompt, params)
        outputs.append(run(engine)["0"])
    return tuple(outputs)


@functools.cache
def texts() -> list[list[int]]:
    """Prompt and output of each request."""
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in alone()]


def assert_same(output: RequestOutput, expected: RequestOutput) -> None:
    ours, plain = output.outputs[0], expected.outputs[0]
    assert ours.token_ids == plain.token_ids
    assert (ours.finish_reason, ours.stop_reason) == (plain.finish_reason, plain.stop_reason)
    assert ours.text == plain.text
    pairs: list[tuple[Any, Any]] = [(ours.logprobs, plain.logprobs)]
    pairs.append((output.prompt_logprobs, expected.prompt_logprobs))
    for found, wanted in pairs:
        assert (found is None) == (wanted is None)
        for entry, expected_entry in zip(found or (), wanted or (), strict=True):
            assert (entry or {}).keys() == (expected_entry or {}).keys()
            for token_id, logprob in (entry or {}).items():
                assert logprob.logprob == pytest.approx(expected_entry[token_id].logprob, abs=1e-4)
                assert logprob.rank == expected_entry[token_id].rank


def run_all(engine: LLMEngine, order: Sequence[int]) -> None:
    """Runs these requests, of which the first comes late, and compares what they say."""
    late = order[0]
    for index in order[1:]:
        engine.add_request(str(index), PROMPTS[index], PARAMS[index], priority=index % 3)
    early = [delta.output for _ in range(3) for delta in engine.step() if delta.output]
    engine.add_request(str(late), PROMPTS[late], PARAMS[late])
    outputs = run(engine) | {output.request_id: output for output in early}
    assert len(outputs) == len(order)
    for index in order:
        assert_same(outputs[str(index)], alone()[index])


# -- what speculates

OWN = ("RightOnHost", "WrongOnHost", "MixedOnHost")
OWN_ON_DEVICE = ("RightOnDevice", "WrongOnDevice", "MixedOnDevice")
ON_HOST = ("ngram", *OWN)
HEADS = ("head", "parallel_head")
ON_DEVICE = ("early_exit", "draft_model", "same_draft_model", *HEADS, *OWN_ON_DEVICE)
CHEAP = StepCosts((1,), (0, 1), ((1.0, 1.05),), ((0.0, 0.1),))


@pytest.fixture(scope="module", autouse=True)
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Random heads for the tiny model; draft models need no files either."""
    folder = tmp_path_factory.mktemp("head")
    engine = tiny_engine()
    model = engine.core.executor._runner.model  # type: ignore[attr-defined]
    for method in HEADS:
        head = DraftHead(model, VOCAB_SIZE, parallel=method == "parallel_head")
        generator = torch.Generator().manual_seed(1)
        for name, parameter in head.named_parameters():
            parameter.data.normal_(float("norm" in name), 0.2, generator=generator)
        head.token_ids.copy_(torch.arange(VOCAB_SIZE))
        save_draft_head(folder / method, head, model, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        nothing = ModelFiles(Path("unused"), Path("unused"))
        patch.setattr(draft_model, "locate_model", lambda model: nothing)
        patch.setattr(LocalExecutor, "step_costs", lambda self: CHEAP)
        yield folder


def speculation(method: str, folder: Path, num_drafts: int, adaptive: bool) -> SpeculativeConfig:
    fields: dict[str, Any] = {"method": method, "on_device": method in ON_DEVICE}
    if method in (*OWN, *OWN_ON_DEVICE):
        fields["method"] = f"{__name__}:{method}"
    elif method == "early_exit":
        fields["num_layers"] = 1
    elif method in HEADS:
        fields |= {"method": "head", "model": str(folder / method)}
    elif method in ("draft_model", "same_draft_model"):
        layers = TINY_MODEL.num_layers - (method == "draft_model")
        fields["model_config"] = replace(TINY_MODEL, num_layers=layers)
        fields |= {"method": "draft_model", "model": "tiny"}
    return SpeculativeConfig(**fields, num_speculative_tokens=num_drafts, adaptive=adaptive)


def moody(patch: pytest.MonkeyPatch, config: SpeculativeConfig) -> None:
    """Drafts that come and go, in numbers that change from step to step."""
    counts = itertools.cycle([*config.draft_counts, 0, config.draft_counts[-1], 0, 0])
    patch.setattr(DraftController, "num_drafts", lambda self, *_: next(counts))
    on = itertools.cycle([True, True, True, False, True, False, False])
    patch.setattr(HostDrafts, "drafting", lambda self, num_rows: num_rows > 0 and next(on))


def check(
    config: SpeculativeConfig,
    mood: str,
    order: Sequence[int],
    graphs: bool = False,
    **options: object,
) -> list[Event]:
    """Runs an engine at one point of the lattice, or one that replays ``graphs``; returns its
    events."""
    events: list[Event] = []
    alone()
    with pytest.MonkeyPatch.context() as patch:
        if graphs:
            replay_graphs(patch)
        if mood == "moody":
            moody(patch, config)
        engine = tiny_engine(speculative_config=config, **options)
        engine.events.subscribe(events.append, DraftsVerified, Preempted)
        run_all(engine, order)
    return events


@settings(max_examples=20, deadline=None)
@given(
    method=st.sampled_from(ON_HOST + ON_DEVICE),
    num_drafts=st.integers(1, MOST),
    mood=st.sampled_from(["always", "adaptive", "moody"]),
    chunk=st.sampled_from([2, 16, 256]),
    caching=st.booleans(),
    block_size=st.sampled_from([1, 4, 16]),
    forced_preemption=st.booleans(),
    depth=st.integers(1, 3),
    policy=st.sampled_from(["fcfs", "priority"]),
    order=st.permutations(range(len(PROMPTS))),
    seqs=st.sampled_from([2, 8]),
    chunked=st.booleans(),
    graphs=st.booleans(),
)
def test_outputs_are_identical_at_every_point(
    head_folder: Path,
    method: str,
    num_drafts: int,
    mood: str,
    chunk: int,
    caching: bool,
    block_size: int,
    forced_preemption: bool,
    depth: int,
    policy: str,
    order: list[int],
    seqs: int,
    chunked: bool,
    graphs: bool,
) -> None:
    check(
        speculation(method, head_folder, num_drafts, adaptive=mood == "adaptive"),
        mood,
        order,
        graphs,
        max_num_batched_tokens=chunk if chunked else 256,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=caching,
        block_size=block_size,
        # 63 tokens: the longest request fits, two long ones do not.
        num_kv_blocks=(64 if forced_preemption else 1024) // block_size + forced_preemption,
        depth=depth,
        scheduling_policy=policy,
        max_num_seqs=min(seqs, chunk),
    )


@pytest.mark.parametrize("method", ON_HOST + ON_DEVICE)
def test_each_proposer_has_drafts_verified(method: str, head_folder: Path) -> None:
    """Else the lattice would show nothing."""
    config = speculation(method, head_folder, MOST, adaptive=False)
    events = check(config, "always", range(len(PROMPTS)), depth=2, num_kv_blocks=17, block_size=4)
    drafts = [event for event in events if isinstance(event, DraftsVerified)]
    accepted = sum(event.num_accepted for event in drafts)
    assert drafts
    if method.startswith("Wrong"):
        assert accepted < 10
    elif method.startswith(("Right", "same")):
        assert accepted > 30
    assert all(event.num_accepted <= event.num_drafts <= MOST for event in drafts)
    assert any(isinstance(event, Preempted) for event in events)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["RightOnHost", "WrongOnHost", "RightOnDevice", "WrongOnDevice"])
def test_adaptive_drafts_are_on_where_they_pay(method: str, depth: int, head_folder: Path) -> None:
    config = speculation(method, head_folder, MOST, adaptive=True)
    events = check(config, "adaptive", [0, 6, 2, 1], depth=depth, max_num_seqs=2)
    drafts = [event for event in events if isinstance(event, DraftsVerified)]
    if method.startswith("Right"):
        assert sum(event.num_accepted for event in drafts) > 15
    else:
        assert len(drafts) < 30
