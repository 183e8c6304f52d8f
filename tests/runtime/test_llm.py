"""The offline API: order, batching, streams that share a batch, and leaving it midway."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_infer import LLM, SamplingParams
from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.errors import (
    InvalidConfigError,
    InvalidRequestError,
    PromptTooLongError,
    StepError,
)
from mini_infer.core.outputs import RequestDelta, StepOutput
from mini_infer.runtime.executor import StepHandle

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(dry_run=True, max_model_len=256, block_size=4) as llm:
        yield llm
        llm.engine.step()  # hands out what aborted requests still had to say
        assert not llm.engine.has_unfinished()
        assert llm.engine.scheduler.cache.num_used_blocks == 0
        assert not llm._inboxes


def texts(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]


def raise_at(llm: LLM, monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """Makes the engine's step number ``step`` raise."""
    original: Callable[[], list[RequestDelta]] = llm.engine.step
    count = 0

    def failing() -> list[RequestDelta]:
        nonlocal count
        count += 1
        if count == step:
            raise error
        return original()

    monkeypatch.setattr(llm.engine, "step", failing)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a long prompt " * 8, "b", "c " * 20]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].text for output in outputs] == [texts(llm, p)[0] for p in prompts]
    assert len({output.request_id for output in outputs}) == 3
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize(
    "prompts", ["hello", ["hello"], [104, 101, 108, 108, 111], [list(b"hello")]]
)
def test_one_prompt_as_text_or_token_ids(llm: LLM, prompts: Any) -> None:
    (output,) = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == list(b"hello")
    assert output.outputs[0].text == texts(llm, "hello")[0]


def test_texts_and_token_ids_in_one_call(llm: LLM) -> None:
    mixed = llm.generate(["hello", list(b"hello")], GREEDY, use_tqdm=False)
    assert mixed[0].outputs[0].token_ids == mixed[1].outputs[0].token_ids
    assert [output.prompt for output in mixed] == ["hello", None]


def test_no_prompt_gives_no_output(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_default_parameters(llm: LLM) -> None:
    (output,) = llm.generate("x", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16


def test_parameters_for_each_prompt(llm: LLM) -> None:
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 7)]
    outputs = llm.generate(["a", "b"], each, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 7]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_parameters_is_an_error(llm: LLM, count: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{count} SamplingParams for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY] * count, use_tqdm=False)


def test_nothing_runs_when_one_prompt_is_refused(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match=r"\b300\b.*\b256\b"):
        llm.generate(["fine", "x" * 300], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished()
    assert texts(llm, "fine")[0]


def test_progress_bar_counts_requests_and_tells_the_rate(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "b", "c"], GREEDY)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "tok/s" in shown
    llm.generate(["a"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_metrics_are_in_order(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY, use_tqdm=False)
    metrics = output.metrics
    times = (
        metrics.queued_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
        metrics.finished_time,
    )
    assert all(time is not None and time > 0 for time in times)
    assert list(times) == sorted(times)  # type: ignore[type-var]
    assert metrics.time_to_first_token is not None
    assert metrics.time_to_first_token >= 0


def test_chat_of_one_conversation_and_of_several(llm: LLM) -> None:
    conversations = [
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}],
    ]
    together = llm.chat(conversations, GREEDY, use_tqdm=False)
    alone = [llm.chat(each, GREEDY, use_tqdm=False)[0] for each in conversations]
    assert [o.outputs[0].text for o in together] == [o.outputs[0].text for o in alone]
    assert together[1].prompt is not None
    assert "Be brief." in together[1].prompt
    assert together[1].prompt.endswith("<|im_start|>assistant\n")


def test_chat_without_a_generation_prompt(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert output.prompt is not None
    assert not output.prompt.endswith("assistant\n")


@pytest.mark.parametrize("messages", [[], [[]], [[{"role": "user", "content": "a"}], []]])
def test_an_empty_conversation_is_an_error(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    deltas = list(llm.stream("hello", GREEDY))
    assert len(deltas) > 3
    assert "".join(delta.text for delta in deltas) == texts(llm, "hello")[0]
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert deltas[-1].output is not None


def test_a_streamed_chat_is_the_answer_in_pieces(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    streamed = "".join(delta.text for delta in llm.stream_chat(messages, GREEDY))
    assert streamed == llm.chat(messages, GREEDY, use_tqdm=False)[0].outputs[0].text


def test_a_stream_of_several_choices(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=10, ignore_eos=True)
    pieces: dict[int, str] = {}
    for delta in llm.stream("hello", params):
        pieces[delta.index] = pieces.get(delta.index, "") + delta.text
    (output,) = llm.generate("hello", params, use_tqdm=False)
    assert pieces == {choice.index: choice.text for choice in output.outputs}


def test_streams_open_at_once_share_the_batch(llm: LLM) -> None:
    prompts = ["one", "two", "three"]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    firsts = [next(stream).text for stream in streams]
    rests = ["".join(delta.text for delta in stream) for stream in reversed(streams)][::-1]
    assert [a + b for a, b in zip(firsts, rests, strict=True)] == texts(llm, prompts)


def test_generate_while_a_stream_is_open(llm: LLM) -> None:
    stream = llm.stream("one", GREEDY)
    text = next(stream).text
    other = texts(llm, "two")
    text += "".join(delta.text for delta in stream)
    assert [text, *other] == texts(llm, ["one", "two"])


def test_closing_a_stream_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY)
    other = llm.stream("other", GREEDY)
    next(stream)
    text = next(other).text
    used = llm.engine.scheduler.cache.num_used_blocks
    stream.close()
    assert llm.engine.scheduler.cache.num_used_blocks < used
    text += "".join(delta.text for delta in other)
    assert text == texts(llm, "other")[0]


def test_a_bad_request_is_refused_when_the_stream_is_made(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.stream("", GREEDY)


def test_a_stream_that_is_never_read_costs_nothing(llm: LLM) -> None:
    llm.stream("hello", GREEDY).close()
    assert not llm.engine.has_unfinished()


def test_ctrl_c_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = texts(llm, ["a", "b"])
    with monkeypatch.context() as patch:
        raise_at(llm, patch, 3, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    assert llm.engine.scheduler.cache.num_used_blocks == 0
    assert texts(llm, ["a", "b"]) == expected


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["launch", "wait"])
def test_ctrl_c_within_a_step_leaves_the_engine_usable(
    where: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(dry_run=True, depth=depth) as llm:
        expected = texts(llm, ["a", "b"])
        stream = llm.stream("other", GREEDY)
        pieces = [next(stream)]
        with monkeypatch.context() as patch:
            interrupt(llm, patch, where)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
        pieces += stream  # it was in that step, too
        assert "".join(piece.text for piece in pieces) == texts(llm, ["other"])[0]
        assert llm.engine.scheduler.cache.num_used_blocks == 0
        assert texts(llm, ["a", "b"]) == expected


def interrupt(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Ctrl-C in the middle of the third launch from now on, or while its result is waited for."""
    original = llm.engine.core.executor.submit
    count = 0

    class Interrupted:
        def __init__(self, handle: StepHandle) -> None:
            self._handle = handle
            self._told = False

        def result(self) -> StepOutput:
            if not self._told:
                self._told = True
                raise KeyboardInterrupt
            return self._handle.result()

    def submit(batch: ScheduledBatch) -> StepHandle:
        nonlocal count
        count += 1
        if count != 3:
            return original(batch)
        if where == "launch":
            raise KeyboardInterrupt
        return Interrupted(original(batch))

    monkeypatch.setattr(llm.engine.core.executor, "submit", submit)


def test_ctrl_c_in_a_stream_leaves_the_engine_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        raise_at(llm, patch, 3, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            list(llm.stream("hello", GREEDY))
    assert llm.engine.scheduler.cache.num_used_blocks == 0
    assert texts(llm, "hello")[0]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_model_that_raises_is_a_typed_error(
    llm: LLM, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core.executor, "submit", lambda batch: 1 / 0)
        run: Any = llm.stream if streamed else functools.partial(texts, llm)
        with pytest.raises(StepError, match=r"request-\d+: ZeroDivisionError"):
            list(run("hello", GREEDY))
    assert texts(llm, "hello")[0]


def test_cache_salt_and_priority_reach_the_engine(llm: LLM) -> None:
    prompt = "a prompt of several blocks"
    llm.generate(prompt, GREEDY, use_tqdm=False)

    def cached(**options: Any) -> int:
        return llm.generate(prompt, GREEDY, use_tqdm=False, **options)[0].num_cached_tokens

    assert cached(priority=3) > 0
    assert cached(cache_salt="tenant") == 0
    assert cached(cache_salt="tenant") > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"block_sise": 4}, "did you mean 'block_size'"), ({"zzz": 1}, "no option 'zzz'")],
)
def test_an_unknown_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        LLM(dry_run=True, **options)


def test_a_model_from_a_folder_and_from_its_gguf_say_the_same(
    tiny_folder: Path, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINI_INFER_CACHE", str(tmp_path))
    outputs = []
    for model in (tiny_folder, tiny_gguf):
        with LLM(str(model), dtype="float32", num_kv_blocks=20) as llm:
            assert llm.engine.config.load_format == (
                "gguf" if model is tiny_gguf else "safetensors"
            )
            outputs.append(texts(llm, ["hello 123", "!"]))
    assert outputs[0] == outputs[1]
