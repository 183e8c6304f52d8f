"""A model that is spread over ranks says what one process says, token by token, in every
architecture and at every point of the lattice; and all ranks compute bitwise the same logits.

Ranks are threads here (``rank_threads.py``): ``test_mp_executor.py`` has the processes.
"""

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.core.events import DraftsVerified, Event, Preempted
from mini_infer.core.model_config import ModelConfig
from mini_infer.core.outputs import RequestOutput
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.core.structured_outputs import StructuredOutputsParams
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.proposers import draft_model
from mini_infer.modeling.proposers.head import DraftHead
from mini_infer.modeling.proposers.head_files import save_draft_head
from mini_infer.runtime.engine import LLMEngine
from tests.modeling.graphs_on_cpu import replay_graphs
from tests.runtime.engine_tools import run
from tests.runtime.fake_executor import TINY_MODEL, VOCAB_SIZE
from tests.runtime.rank_threads import RankThreads, sharded_engine
from tests.runtime.tiny_model import tiny_engine

# Neither the vocabulary nor the inner size divides by all sizes; three ranks cut through the groups
# of heads that share keys, and six have less than one group each.
LLAMA = replace(TINY_MODEL, num_heads=6, num_kv_heads=2, intermediate_size=47)
SIZES = (2, 3, 6)
MODELS: dict[str, ModelConfig] = {
    "llama": LLAMA,
    "llama-biases-tied": replace(
        LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama-multi-head": replace(LLAMA, num_kv_heads=6),
    "mistral-window": replace(
        LLAMA, architecture="MistralForCausalLM", sliding_window=9, sliding_layers=(True, True)
    ),
    "qwen2-tied": replace(
        LLAMA, architecture="Qwen2ForCausalLM", attention_bias=True, tie_word_embeddings=True
    ),
    "qwen3": replace(LLAMA, architecture="Qwen3ForCausalLM", head_dim=12, num_kv_heads=3),
}
METHODS = (None, "ngram", "early_exit", "draft_model", "head", "parallel_head")

PROMPTS = [
    [random.Random(seed).randrange(256) for _ in range(length)]
    for seed, length in enumerate([5, 33, 18, 30])
]
PROMPTS += [PROMPTS[1][:20] + PROMPTS[2], [7, 8, 9] * 6]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=11, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, seed=3, max_tokens=8, prompt_logprobs=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.3, max_tokens=9),
    SamplingParams(
        temperature=0.8,
        seed=8,
        max_tokens=20,
        structured_outputs=StructuredOutputsParams(regex="[a-c]{3}(-[0-9]{2}){1,3}"),
    ),
    SamplingParams(temperature=0.0, max_tokens=14, min_tokens=6, logit_bias={65: 3.0}),
]


@functools.cache
def alone(model: str) -> tuple[RequestOutput, ...]:
    """Each request's output in one process, without company."""
    engine = tiny_engine(model_config=MODELS[model], enable_prefix_caching=False)
    outputs = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.add_request("0", prompt, params)
        outputs.append(run(engine)["0"])
    return tuple(outputs)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where random draft heads are, by the name of their target."""
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module", autouse=True)
def draft_models_need_no_files() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        nothing = ModelFiles(Path("unused"), Path("unused"))
        patch.setattr(draft_model, "locate_model", lambda model: nothing)
        yield


def head_folder(heads: Path, name: str, *, parallel: bool) -> Path:
    folder = heads / f"{name}-{parallel}"
    if not folder.exists():
        target = tiny_engine(model_config=MODELS[name]).core.executor
        model = target._runner.model  # type: ignore[attr-defined]
        head = DraftHead(model, VOCAB_SIZE, parallel=parallel)
        generator = torch.Generator().manual_seed(1)
        for parameter_name, parameter in head.named_parameters():
            parameter.data.normal_(float("norm" in parameter_name), 0.2, generator=generator)
        head.token_ids.copy_(torch.arange(VOCAB_SIZE))
        save_draft_head(folder, head, model, torch.float32)
    return folder


def speculation(method: str | None, name: str, heads: Path) -> SpeculativeConfig | None:
    if method is None:
        return None
    fields: dict[str, Any] = {"method": method, "on_device": method != "ngram"}
    if method == "early_exit":
        fields["num_layers"] = 1
    elif method in ("head", "parallel_head"):
        folder = head_folder(heads, name, parallel=method == "parallel_head")
        fields |= {"method": "head", "model": str(folder)}
    elif method == "draft_model":
        fields |= {"model": "tiny", "model_config": replace(TINY_MODEL, num_layers=1)}
    return SpeculativeConfig(num_speculative_tokens=3, adaptive=False, **fields)


def check(engine: LLMEngine, name: str, order: Sequence[int]) -> list[Event]:
    """Runs these requests, of which the first comes late; returns what happened."""
    events: list[Event] = []
    engine.events.subscribe(events.append, DraftsVerified, Preempted)
    for index in order[1:]:
        engine.add_request(str(index), PROMPTS[index], PARAMS[index])
    early = [delta.output for _ in range(3) for delta in engine.step() if delta.output]
    engine.add_request(str(order[0]), PROMPTS[order[0]], PARAMS[order[0]])
    outputs = run(engine) | {output.request_id: output for output in early}
    for index in order:
        assert_same(outputs[str(index)], alone(name)[index])
    ranks = engine.core.executor
    assert isinstance(ranks, RankThreads)
    ranks.assert_same_logits()
    engine.shutdown()
    return events


def assert_same(output: RequestOutput, expected: RequestOutput) -> None:
    ours, theirs = output.outputs[0], expected.outputs[0]
    assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
    assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
    assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
    for found, wanted in zip(
        output.prompt_logprobs or (), expected.prompt_logprobs or (), strict=True
    ):
        assert (found or {}).keys() == (wanted or {}).keys()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_every_architecture(name: str, size: int) -> None:
    engine = sharded_engine(model_config=MODELS[name], tensor_parallel_size=size)
    check(engine, name, range(len(PROMPTS)))


@pytest.mark.parametrize("method", METHODS[1:])
def test_each_proposer_has_drafts_verified(method: str, heads: Path) -> None:
    engine = sharded_engine(
        model_config=LLAMA,
        tensor_parallel_size=3,
        speculative_config=speculation(method, "llama", heads),
    )
    events = check(engine, "llama", range(len(PROMPTS)))
    assert any(isinstance(event, DraftsVerified) for event in events)


@settings(max_examples=10, deadline=None)
@given(
    name=st.sampled_from(list(MODELS)),
    size=st.sampled_from(SIZES),
    method=st.sampled_from(METHODS),
    chunk=st.sampled_from([5, 16, 256]),
    caching=st.booleans(),
    block_size=st.sampled_from([1, 4, 16]),
    forced_preemption=st.booleans(),
    depth=st.sampled_from([1, 2]),
    order=st.permutations(range(len(PROMPTS))),
)
def test_outputs_are_identical_at_every_point(
    heads: Path,
    name: str,
    size: int,
    method: str | None,
    chunk: int,
    caching: bool,
    block_size: int,
    forced_preemption: bool,
    depth: int,
    order: list[int],
) -> None:
    engine = sharded_engine(
        model_config=MODELS[name],
        tensor_parallel_size=size,
        speculative_config=speculation(method, name, heads),
        max_num_batched_tokens=chunk,
        max_num_seqs=min(8, chunk),
        enable_prefix_caching=caching,
        block_size=block_size,
        # 63 tokens: the longest request fits, two long ones do not.
        num_kv_blocks=(64 if forced_preemption else 1024) // block_size + forced_preemption,
        depth=depth,
    )
    check(engine, name, order)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_replay_graphs(
    method: str | None, depth: int, heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = speculation(method, "llama", heads)
    alone("llama")  # which has none
    replay_graphs(monkeypatch)
    engine = sharded_engine(
        model_config=LLAMA, tensor_parallel_size=2, speculative_config=config, depth=depth
    )
    check(engine, "llama", range(len(PROMPTS)))


def test_the_lattices_small_pool_does_preempt() -> None:
    engine = sharded_engine(
        model_config=LLAMA, tensor_parallel_size=2, num_kv_blocks=17, block_size=4
    )
    events = check(engine, "llama", range(len(PROMPTS)))
    assert any(isinstance(event, Preempted) for event in events)


def test_ranks_that_measure_their_steps_go_on_together(heads: Path) -> None:
    speculative_config = speculation("early_exit", "llama", heads)
    assert speculative_config is not None
    engine = sharded_engine(
        model_config=LLAMA,
        tensor_parallel_size=2,
        speculative_config=replace(speculative_config, adaptive=True),
    )
    check(engine, "llama", range(len(PROMPTS)))
