"""Events as the scheduler tells them: a request's stages, and the state after a step."""

from mini_infer.cache.manager import KVCacheManager
from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.events import Admitted, Finished, Queued, StepCompleted
from mini_infer.core.request import Request, RequestState
from mini_infer.runtime.request_queues import RequestQueues


def queued_event(request: Request, now: float) -> Queued:
    """Of a request that the scheduler took, with what its caller asked for."""
    return Queued(
        now, request.request_id, request.num_prompt_tokens, request.max_tokens, request.params.n
    )


def admitted_event(request: Request, looks_up: bool, now: float) -> Admitted:
    """Of a request whose ``num_cached_tokens`` are known, and whether its prompt was looked up."""
    assert request.num_cached_tokens is not None
    num_prompt_tokens = request.num_prompt_tokens
    return Admitted(
        now,
        request.request_id,
        num_prompt_tokens,
        request.num_cached_tokens,
        num_prompt_tokens if looks_up else 0,
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


def step_event(
    batch: ScheduledBatch, queues: RequestQueues, cache: KVCacheManager, now: float
) -> StepCompleted:
    """Of a step that was taken in."""
    return StepCompleted(
        now,
        batch.step_id,
        batch.num_tokens,
        queues.count(RequestState.WAITING),
        queues.num_running,
        queues.count(RequestState.PREEMPTED),
        cache.num_used_blocks,
        cache.num_blocks,
    )
