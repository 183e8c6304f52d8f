"""What one chunk's result means for its request: new tokens, and whether they end it."""

from mini_infer.core.batch import Chunk
from mini_infer.core.events import EventStream, TokensEmitted
from mini_infer.core.outputs import FinishReason, RequestUpdate, StepOutput
from mini_infer.core.request import Request


def apply_chunk_result(
    request: Request, chunk: Chunk, out: StepOutput, index: int, events: EventStream
) -> RequestUpdate | None:
    """Appends the chunk's sampled tokens up to the first that stops the request.

    Several tokens may come at once (accepted drafts); those after a stop or beyond ``max_tokens``
    are dropped. Returns None for a chunk that does not reach its request's end.
    """
    if out.prompt_logprobs:
        _collect_prompt_logprobs(request, chunk, out, index)
    if not chunk.samples:
        return None
    request.num_in_flight_tokens -= 1
    reason: FinishReason | None = None
    stop_token: int | None = None
    kept = 0
    for token_id in out.token_ids[index]:
        request.token_ids.append(token_id)
        kept += 1
        reason, stop_token = _check_stop(request, token_id)
        if reason is not None:
            break
    first = request.num_output_tokens == kept
    new_token_ids = out.token_ids[index][:kept]
    events.emit(
        TokensEmitted(events.now(), request.request_id, new_token_ids, request.num_output_tokens)
    )
    return RequestUpdate(
        request_id=request.request_id,
        new_token_ids=new_token_ids,
        new_logprobs=out.logprobs[index][:kept] if out.logprobs else (),
        finish_reason=reason,
        stop_reason=stop_token,
        num_cached_tokens=request.num_cached_tokens or 0,
        prompt_logprobs=tuple(request.prompt_logprobs)
        if first and request.prompt_logprobs
        else None,
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
