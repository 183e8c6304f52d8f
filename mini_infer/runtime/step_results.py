"""What one chunk's result means for its request: new tokens, and whether they end it."""

from mini_infer.core.batch import Chunk
from mini_infer.core.events import EventStream, TokensEmitted
from mini_infer.core.outputs import FinishReason, RequestUpdate, StepOutput
from mini_infer.core.request import Request
from mini_infer.core.structured_outputs import FORM_FAILED


def apply_chunk_result(
    request: Request,
    chunk: Chunk,
    out: StepOutput,
    index: int,
    time: float,
    events: EventStream | None = None,
) -> RequestUpdate | None:
    """Appends the chunk's sampled tokens up to the first that stops the request.

    ``time`` is when the step's result was taken in; ``events`` is None where nobody listens to
    tokens.

    Several tokens may come at once (accepted drafts); those after a stop or beyond ``max_tokens``
    are dropped. Returns None where there is nothing to tell: for a chunk that does not reach its
    request's end, and for a request that is told at its end and goes on.
    """
    if out.prompt_logprobs:
        _collect_prompt_logprobs(request, chunk, out, index)
    if not chunk.samples:
        return None
    reason: FinishReason | None = None
    stop_reason: int | str | None = None
    new_token_ids = out.token_ids[index]
    request.num_in_flight_tokens -= 1 + chunk.num_drafts
    if chunk.num_drafts:  # they counted as computed and accepted
        request.num_in_flight_drafts -= chunk.num_drafts
        request.num_computed_tokens -= chunk.num_drafts + 1 - len(new_token_ids)
    if out.draft_token_ids:
        request.draft_token_ids = out.draft_token_ids[index]
    for kept, token_id in enumerate(new_token_ids, start=1):
        request.token_ids.append(token_id)
        if token_id in request.end_token_ids or len(request.token_ids) >= request.max_num_tokens:
            reason, stop_reason = _check_stop(request, token_id)
        if request.grammar is not None:
            error = request.grammar.accept(token_id)
            if error is not None:
                reason = "error"
                stop_reason = FORM_FAILED + error
            elif request.grammar.complete and reason != "stop":
                reason = "stop"  # also where it is the last token that the output may have
        if reason is not None:
            new_token_ids = new_token_ids[:kept]
            break
    prompt_logprobs = None
    if request.first_token_time is None:
        request.first_token_time = time
        if request.params.prompt_logprobs is not None:  # nothing predicts a prompt's only token
            prompt_logprobs = tuple(request.prompt_logprobs) or (None,)
    request.last_token_time = time
    if events is not None:
        events.emit(
            TokensEmitted(time, request.request_id, new_token_ids, request.num_output_tokens)
        )
    if request.told_at_end:
        return None if reason is None else end_update(request, reason, stop_reason)
    return RequestUpdate(
        request.request_id,
        new_token_ids,
        out.logprobs[index][: len(new_token_ids)] if out.logprobs else (),
        reason,
        stop_reason,
        request.num_cached_tokens or 0,
        prompt_logprobs,
        time,
    )


def end_update(
    request: Request, reason: FinishReason, stop_reason: int | str | None = None
) -> RequestUpdate:
    """The update of a request that ends: its tokens, where they were not told as they came."""
    return RequestUpdate(
        request.request_id,
        tuple(request.output_token_ids) if request.told_at_end else (),
        (),
        reason,
        stop_reason,
        request.num_cached_tokens or 0,
    )


def _check_stop(request: Request, token_id: int) -> tuple[FinishReason | None, int | None]:
    params = request.params
    if request.num_output_tokens >= params.min_tokens:
        if token_id in request.stop_token_ids:
            return "stop", token_id
        if token_id in request.eos_token_ids and not params.ignore_eos:
            return "stop", None
    if request.num_output_tokens >= request.max_tokens:
        return "length", None
    return None, None


def _collect_prompt_logprobs(request: Request, chunk: Chunk, out: StepOutput, index: int) -> None:
    """Adds each position once, also when a preemption makes it be computed again."""
    collected = request.prompt_logprobs
    if not collected and out.prompt_logprobs[index]:
        collected.append(None)  # nothing predicts the first token
    for offset, entry in enumerate(out.prompt_logprobs[index]):
        if chunk.num_computed_tokens + 1 + offset == len(collected):
            collected.append(entry)
