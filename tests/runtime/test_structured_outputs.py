"""Requests under grammars beside free ones, on a tiny random model and in dry runs: what they say
does not depend on chunks, blocks, preemption or depth, and always has its form."""

import functools
import json
import math
import random
import re
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer import LLM, StructuredOutputsParams
from mini_infer.core.errors import InvalidRequestError
from mini_infer.core.events import Preempted
from mini_infer.core.outputs import RequestOutput
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime import grammar_requests
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.engine_core import EngineCore
from tests.runtime.engine_tools import fake_engine, generate, run, step
from tests.runtime.fake_executor import FakeExecutor, make_config
from tests.runtime.tiny_model import tiny_engine

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


def held(**fields: Any) -> SamplingParams:
    form = {name: fields.pop(name) for name in list(fields) if name in FORMS}
    outputs = StructuredOutputsParams(**form)
    return SamplingParams(**{"max_tokens": 40, **fields}, structured_outputs=outputs)


FORMS = ("json", "regex", "choice", "grammar", "json_object", "thoughts")
PROMPTS = [
    [random.Random(seed).randrange(256) for _ in range(length)]
    for seed, length in enumerate([5, 33, 18, 1, 50])
]
PROMPTS.append(PROMPTS[1])
PARAMS = [
    held(temperature=0.0, json=SCHEMA),
    held(temperature=0.9, seed=11, choice=["first", "second", "third é"]),
    held(temperature=0.7, top_k=20, top_p=0.8, seed=3, regex="[a-c]{3}(-[0-9]{2}){1,4}"),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=9),
    SamplingParams(temperature=1.0, seed=5, max_tokens=8, logprobs=2),
    held(temperature=1.0, seed=5, logprobs=1, grammar='root ::= "<" [a-z]+ ">" | root root'),
]


@functools.cache
def alone() -> tuple[tuple[int, ...], ...]:
    outputs = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine = tiny_engine(enable_prefix_caching=False, max_num_batched_tokens=256, block_size=16)
        outputs.append(tuple(generate(engine, [prompt], params)[0]))
    return tuple(outputs)


def test_every_output_has_its_form() -> None:
    texts = [ByteTokenizer().decode(token_ids) for token_ids in alone()]
    value = json.loads(texts[0])
    assert isinstance(value["ok"], bool)
    assert value["n"] <= 99
    assert texts[1] in ("first", "second", "third é")
    assert re.fullmatch("[a-c]{3}(-[0-9]{2}){1,4}", texts[2])
    assert re.match("<[a-z]+", texts[5])


@settings(max_examples=12, deadline=None)
@given(
    chunk=st.sampled_from([1, 3, 16, 256]),
    caching=st.booleans(),
    block_size=st.sampled_from([1, 4, 16]),
    forced_preemption=st.booleans(),
    depth=st.sampled_from([1, 2, 3]),
    order=st.permutations(range(len(PROMPTS))),
    seqs=st.sampled_from([2, 8]),
)
def test_token_ids_are_identical_at_every_point(
    chunk: int,
    caching: bool,
    block_size: int,
    forced_preemption: bool,
    depth: int,
    order: list[int],
    seqs: int,
) -> None:
    engine = tiny_engine(
        max_num_batched_tokens=chunk,
        enable_prefix_caching=caching,
        block_size=block_size,
        num_kv_blocks=80 // block_size if forced_preemption else 256,
        depth=depth,
        max_num_seqs=min(seqs, chunk),
    )
    outputs = generate(engine, [PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    for index, token_ids in zip(order, outputs, strict=True):
        assert tuple(token_ids) == alone()[index]


def test_the_lattices_small_pool_does_preempt() -> None:
    engine = tiny_engine(num_kv_blocks=20, block_size=4)
    preempted: set[int] = set()
    engine.events.subscribe(lambda event: preempted.add(int(event.request_id)), Preempted)
    order = [4, 1, 0, 2, 3, 5]
    generate(engine, [PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    assert any(PARAMS[order[place]].structured_outputs for place in preempted), preempted


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(dry_run=True, depth=request.param)


def one(llm: LLM, params: SamplingParams, prompt: str = "hello") -> RequestOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_the_last_token_is_part_of_the_text(llm: LLM, stop: tuple[str, ...], stream: bool) -> None:
    engine = llm.engine
    engine.add_request("x", "hello", held(regex="ab", stop=stop), stream=stream)
    [choice] = run(engine)["x"].outputs
    assert (choice.text, choice.token_ids) == ("ab", [97, 98])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


def test_an_end_that_the_model_chose_is_no_part_of_it(llm: LLM) -> None:
    bias = {257: 100.0}
    choice = one(llm, held(regex="a+", logit_bias=bias)).outputs[0]
    assert (choice.text, choice.token_ids, choice.finish_reason) == ("a", [97, 257], "stop")


def test_lengths(llm: LLM) -> None:
    choice = one(llm, held(regex="a{9}", max_tokens=4)).outputs[0]
    assert (choice.text, choice.finish_reason) == ("aaaa", "length")
    choice = one(llm, held(regex="a{4}", max_tokens=4)).outputs[0]
    assert (choice.text, choice.finish_reason) == ("aaaa", "stop")
    bias = {257: 100.0}
    choice = one(llm, held(regex="a*", min_tokens=5, logit_bias=bias)).outputs[0]
    assert (choice.text, choice.finish_reason) == ("aaaaa", "stop")
    choice = one(llm, held(regex="a", min_tokens=5)).outputs[0]
    assert (choice.text, choice.finish_reason) == ("a", "stop")  # nothing can follow


def test_ignoring_the_end_goes_on_while_the_grammar_does(llm: LLM) -> None:
    bias = {257: 100.0}
    choice = one(llm, held(regex="a*", ignore_eos=True, logit_bias=bias, max_tokens=7)).outputs[0]
    assert (choice.text, choice.finish_reason) == ("aaaaaaa", "length")
    choice = one(llm, held(regex="a{3}", ignore_eos=True, logit_bias=bias)).outputs[0]
    assert (choice.text, choice.finish_reason) == ("aaa", "stop")


def test_a_stop_string_and_a_stop_token_end_it_earlier(llm: LLM) -> None:
    assert one(llm, held(regex="abcd", stop="bc")).outputs[0].text == "a"
    choice = one(llm, held(regex="abcd", stop_token_ids=[99])).outputs[0]
    assert (choice.text, choice.stop_reason) == ("ab", 99)


def test_choices_follow_the_grammar_each_for_itself(llm: LLM) -> None:
    params = held(n=8, seed=1, choice=[f"{letter}{letter}!" for letter in "abcdefgh"])
    texts = [choice.text for choice in one(llm, params).outputs]
    assert all(re.fullmatch(r"([a-h])\1!", text) for text in texts)
    assert len(set(texts)) > 2


def test_logprobs_are_those_of_what_is_allowed(llm: LLM) -> None:
    choice = one(llm, held(regex="[ab]c", logprobs=20, temperature=0.0)).outputs[0]
    assert choice.logprobs is not None
    first, second = choice.logprobs
    assert set(first) == {97, 98}
    assert math.isclose(sum(math.exp(item.logprob) for item in first.values()), 1.0)
    assert set(second) == {99}
    assert second[99].logprob == 0.0


def test_free_requests_beside_them_say_the_same(llm: LLM) -> None:
    free = SamplingParams(temperature=0.8, seed=4, max_tokens=30)
    [expected] = one(llm, free, "free").outputs
    both = llm.generate(["free", "x", "free"], [free, held(json=SCHEMA), free], use_tqdm=False)
    assert [both[0].outputs[0].text, both[2].outputs[0].text] == [expected.text] * 2


def test_a_grammar_that_becomes_too_complex_ends_its_request_only(llm: LLM) -> None:
    engine = llm.engine
    engine.add_request("x", "hello", held(regex="[a-z]{20}"))
    engine.add_request("y", "hello", held(regex="[a-z]{20}"))
    step(engine)
    request = engine.core.scheduler._requests["x"]
    request.grammar.matcher.consume_token(ord("!"))  # type: ignore[union-attr]
    outputs = run(engine)
    assert outputs["x"].outputs[0].finish_reason == "error"
    assert "can't be held to its form" in str(outputs["x"].outputs[0].stop_reason)
    assert len(outputs["y"].outputs[0].text) == 20


def test_whoever_asked_for_a_form_that_fails_is_told(llm: LLM) -> None:
    names = {f"p{index}": {"type": "string"} for index in range(1500)}
    many = {"type": "object", "properties": names}
    with pytest.raises(InvalidRequestError, match=r"can't be held to its form: .* items"):
        llm.generate("x", held(json=many, temperature=0.0, max_tokens=1000), use_tqdm=False)


def test_abort_amid_a_grammar(llm: LLM) -> None:
    engine = llm.engine
    engine.add_request("x", "hello", held(n=3, regex="[a-z]{20}"))
    step(engine)
    engine.abort("x")
    assert {c.finish_reason for c in run(engine)["x"].outputs} == {"abort"}
    engine.add_request("x", "hello", held(regex="b{3}"))
    assert run(engine)["x"].outputs[0].text == "bbb"


def test_an_invalid_one_is_refused_before_it_is_queued(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        llm.generate("x", held(regex="(a"), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="give one of them"):
        held(regex="a", allowed_token_ids=[1])
    with pytest.raises(InvalidRequestError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    assert not llm.engine.has_unfinished()


# -- while a grammar is compiled


class LateCompiler:
    """Compiles when it is told to."""

    def __init__(self, engine: LLMEngine) -> None:
        self.real = engine.core._grammars._compiler
        self.future: Future[Any] = Future()
        engine.core._grammars._compiler = self  # type: ignore[assignment]

    def start(self, params: StructuredOutputsParams) -> "Future[Any]":
        self.params = params
        return self.future

    def grammar(self, matcher: Any, ignore_eos: bool) -> Any:
        assert self.real is not None
        return self.real.grammar(matcher, ignore_eos)

    def finish(self) -> None:
        assert self.real is not None
        self.future.set_result(self.real.start(self.params).result())


@pytest.fixture
def late(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LateCompiler:
    monkeypatch.setattr(grammar_requests, "WAIT_SECONDS", 0.0)
    return LateCompiler(llm.engine)


def test_others_run_while_one_waits_for_its_grammar(llm: LLM, late: LateCompiler) -> None:
    engine = llm.engine
    engine.add_request("x", "hello", held(n=2, regex="ab"))
    engine.add_request("y", "hello", SamplingParams(max_tokens=3))
    done = []
    while "y" not in done:
        done += [delta.request_id for delta in step(engine) if delta.output]
    for _ in range(3):
        assert step(engine) == []
        assert engine.has_unfinished()
    late.finish()
    assert [choice.text for choice in run(engine)["x"].outputs] == ["ab", "ab"]


def test_abort_of_one_that_waits(llm: LLM, late: LateCompiler) -> None:
    engine = llm.engine
    engine.add_request("x", "hello", held(n=2, regex="ab"))
    step(engine)
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request("x", "hello", held(regex="ab"))
    engine.abort("x")
    late.finish()
    assert {choice.finish_reason for choice in run(engine)["x"].outputs} == {"abort"}
    assert not engine.has_unfinished()


def test_one_whose_grammar_fails_ends_with_an_error(llm: LLM, late: LateCompiler) -> None:
    engine = llm.engine
    engine.add_request("x", "hello", held(n=2, regex="ab"))
    step(engine)
    late.future.set_exception(InvalidRequestError("no such grammar"))
    outputs = run(engine)["x"].outputs
    assert [choice.finish_reason for choice in outputs] == ["error"] * 2
    assert "no such grammar" in str(outputs[0].stop_reason)


def test_one_that_the_scheduler_refuses_is_forgotten() -> None:
    engine = fake_engine(num_kv_blocks=4)
    engine.input_processor._pool = None
    params = held(regex="[ab]*", n=2, max_tokens=200)
    with pytest.raises(InvalidRequestError, match="KV blocks"):
        engine.add_request("a", [1, 2, 3], params)
    assert not engine.core._grammars._running
    assert not engine.has_unfinished()


def test_a_core_without_grammars_refuses() -> None:
    config = make_config()
    core = EngineCore(config, FakeExecutor(config))
    processed = fake_engine().input_processor.process("x", [1], held(regex="a"))
    with pytest.raises(InvalidRequestError, match="no grammars"):
        core.add(processed.requests)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_fails_as_it_samples(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(dry_run=True, depth=depth)
    engine = llm.engine
    engine.add_request("x", "hello", held(regex="[a-z]{30}"))
    step(engine)
    monkeypatch.setattr(llm.engine.core.executor, "run", lambda *_: 1 / 0)
    for _ in range(2):
        step(engine)
    monkeypatch.undo()
    engine.add_request("y", "hello", held(regex="b{3}"))
    outputs = run(engine)
    assert outputs["y"].outputs[0].text == "bbb"
