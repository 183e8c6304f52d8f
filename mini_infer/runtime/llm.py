"""The offline API: a list of prompts in, a list of outputs out."""

import itertools
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from numbers import Integral
from typing import Any, cast

from tqdm import tqdm

from mini_infer.core.errors import InvalidRequestError, StepError
from mini_infer.core.outputs import RequestDelta, RequestOutput
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.structured_outputs import form_failure
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.input_processor import ProcessedRequest

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """An engine in this process. Keyword arguments are the options of ``EngineConfig``.

    ::

        llm = LLM(model="smollm2-135m", max_model_len=2048)
        for out in llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=64)):
            print(out.outputs[0].text)

    Raises:
        MiniInferError: an option, the model or its weights can't be used.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        if model is not None:
            options["model"] = model
        self.engine = LLMEngine.from_options(**options)
        self._ids = itertools.count()
        self._inboxes: dict[str, deque[RequestDelta]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Completes prompts (texts or token ids), batched, and returns outputs in their order.

        ``sampling_params`` is one for all prompts or one for each.

        Raises:
            InvalidRequestError: a prompt or parameter can't be served; nothing is generated then.
            StepError: the model raised.
        """
        processed = self._process(
            _as_list(prompts),
            sampling_params,
            priority=priority,
            cache_salt=cache_salt,
            stream=False,
        )
        return self._finish(processed, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, through the model's chat template."""
        prompts = [
            self._chat_prompt(conversation, add_generation_prompt, chat_template_kwargs or {})
            for conversation in _as_conversations(messages)
        ]
        processed = self._process(prompts, sampling_params, add_special_tokens=False, stream=False)
        return self._finish(processed, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestDelta, None, None]:
        """Completes one prompt, yielding each piece of text as it comes.

        Several streams may be open at once; they share the batch. Closing one aborts its request.
        """
        (processed,) = self._process([prompt], sampling_params)
        return self._stream(processed)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[RequestDelta, None, None]:
        """Answers one conversation, yielding each piece of text as it comes."""
        prompt = self._chat_prompt(messages, True, {})
        (processed,) = self._process([prompt], sampling_params, add_special_tokens=False)
        return self._stream(processed)

    def shutdown(self) -> None:
        """Frees the model's memory."""
        self.engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _process(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        **options: Any,
    ) -> list[ProcessedRequest]:
        return [
            self.engine.input_processor.process(self._next_id(), prompt, each, **options)
            for prompt, each in zip(
                prompts, _one_for_each(sampling_params, len(prompts)), strict=True
            )
        ]

    def _finish(self, processed: Sequence[ProcessedRequest], use_tqdm: bool) -> list[RequestOutput]:
        order = [item.request_id for item in processed]
        try:
            for item in processed:
                self._open(item)
            outputs = self._run(order, use_tqdm)
        finally:  # also after Ctrl-C: the engine must be free for the next call
            for request_id in order:
                self._close(request_id)
        return [outputs[request_id] for request_id in order]

    def _stream(self, processed: ProcessedRequest) -> Generator[RequestDelta, None, None]:
        inbox = self._open(processed)
        try:
            finished = False
            while not finished:
                while not inbox:
                    self._pump()
                delta = inbox.popleft()
                _raise_on_error(delta)
                finished = delta.output is not None
                yield delta
        finally:
            self._close(processed.request_id)

    def _run(self, order: Sequence[str], use_tqdm: bool) -> dict[str, RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        wanted = set(order)
        num_tokens = 0
        progress = tqdm(total=len(order), desc="Requests") if use_tqdm else nullcontext()
        with progress as bar:
            while len(outputs) < len(order):
                for request_id in self._pump() & wanted:
                    inbox = self._inboxes[request_id]
                    while inbox:
                        delta = inbox.popleft()
                        _raise_on_error(delta)
                        num_tokens += len(delta.token_ids)
                        if delta.output is not None:
                            outputs[request_id] = delta.output
                            if bar is not None:
                                rate = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
                                bar.set_postfix_str(f"{rate:.1f} tok/s", refresh=False)
                                bar.update()
        return outputs

    def _open(self, processed: ProcessedRequest) -> deque[RequestDelta]:
        self.engine.add(processed)
        inbox = self._inboxes[processed.request_id] = deque()
        return inbox

    def _close(self, request_id: str) -> None:
        self._inboxes.pop(request_id, None)
        self.engine.abort(request_id, silently=True)

    def _pump(self) -> set[str]:
        """Runs one step and sorts its deltas into the open inboxes; returns whose have news."""
        touched = set()
        for delta in self.engine.step():
            if delta.request_id in self._inboxes:  # else its caller is gone
                self._inboxes[delta.request_id].append(delta)
                touched.add(delta.request_id)
        return touched

    def _chat_prompt(
        self, messages: Sequence[Message], add_generation_prompt: bool, kwargs: Mapping[str, Any]
    ) -> str:
        return self.engine.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )

    def _next_id(self) -> str:
        return f"request-{next(self._ids)}"


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts, also where one text or one list (or array) of token ids was given."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        items = list(prompts)
    except TypeError:
        raise InvalidRequestError(
            f"prompts must be a text, token ids, or a list of either, got {prompts!r}", "prompt"
        ) from None
    if items and isinstance(items[0], Integral):
        return [cast("Prompt", prompts)]
    return cast("list[Prompt]", items)


def _as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Sequence[Sequence[Message]]:
    """Several conversations, also where one was given; what is neither, the template refuses."""
    if isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple):
        return cast("Sequence[Sequence[Message]]", messages)
    return [cast("Sequence[Message]", messages)]


def _one_for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    if len(sampling_params) != count:
        raise InvalidRequestError(
            f"{len(sampling_params)} SamplingParams for {count} prompts", "sampling_params"
        )
    return list(sampling_params)


def _raise_on_error(delta: RequestDelta) -> None:
    if delta.finish_reason == "error":
        if (failure := form_failure(delta.stop_reason)) is not None:
            raise failure
        raise StepError(f"a step failed with request {delta.request_id}: {delta.stop_reason}")
