"""The events of a request's ends, as the scheduler tells them."""

from mini_infer.core.events import Finished, Queued
from mini_infer.core.request import Request


def queued_event(request: Request, now: float) -> Queued:
    """Of a request that the scheduler took, with what its caller asked for."""
    return Queued(
        now, request.request_id, request.num_prompt_tokens, request.max_tokens, request.params.n
    )


def finished_event(request: Request, now: float) -> Finished:
    """Of a request whose ``finish_reason`` is set."""
    assert request.finish_reason is not None
    return Finished(
        now,
        request.request_id,
        request.finish_reason,
        request.num_prompt_tokens,
        request.num_output_tokens,
        request.first_token_time,
        request.last_token_time,
    )
