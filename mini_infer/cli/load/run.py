"""Sends a workload at its arrival times and collects the records."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mini_infer.cli.load.client import PATHS, Record, send

if TYPE_CHECKING:
    import aiohttp

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Job:
    """A request to send: ``arrival`` seconds after the start, and at most so many tokens back."""

    prompt: str
    num_output_tokens: int
    arrival: float = 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what all of them say."""

    base_url: str
    endpoint: str
    """``chat`` or ``completions``."""
    fields: Mapping[str, Any]

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1") + PATHS[self.endpoint]

    def body(self, job: Job) -> dict[str, Any]:
        """A streamed request."""
        text: dict[str, Any] = {"prompt": job.prompt}
        if self.endpoint == "chat":
            text = {"messages": [{"role": "user", "content": job.prompt}]}
        return {
            **text,
            "max_tokens": job.num_output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }


async def send_all(
    session: "aiohttp.ClientSession",
    target: Target,
    jobs: Sequence[Job],
    *,
    max_concurrency: int | None = None,
    on_record: Callable[[Record], object] = lambda record: None,
) -> list[Record]:
    """Sends every job when its time has come; the records are in the order of the jobs.

    Where ``max_concurrency`` requests are under way, the next waits on the client's side and its
    time begins when it is sent, as in ``vllm bench serve``.
    """
    limit = asyncio.Semaphore(max_concurrency or len(jobs) or 1)
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def send_one(job: Job) -> Record:
        async with limit:
            record = await send(session, target.url, target.body(job))
        on_record(record)
        return record

    tasks = []
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            delay = start + job.arrival - loop.time()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(group.create_task(send_one(job)))
    return [task.result() for task in tasks]


def run_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs ``work`` on the fastest event loop that is installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)
