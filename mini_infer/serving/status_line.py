"""The log line of a server that works: load, throughput and caches, every few seconds.

It counts nothing: a thread that sleeps reads the totals that ``ServerMetrics`` heard from the event
stream, and logs what they gained since it last looked. The event loop does nothing for it.
"""

import logging
import threading
import time
from typing import Self

from mini_infer.serving.draft_metrics import describe, difference
from mini_infer.serving.metrics import EngineMetrics
from mini_infer.serving.server_metrics import ServerMetrics

status_logger = logging.getLogger("mini_infer.status")


class StatusLine:
    """Within its ``with`` block, logs a line every ``interval`` seconds while there is work.

    Never where ``interval`` is 0.
    """

    def __init__(self, metrics: EngineMetrics | ServerMetrics, interval: float) -> None:
        self._metrics = metrics
        self._interval = interval
        self._last = metrics.totals()
        self._last_time = time.monotonic()
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        if self._interval:
            self._last_time = time.monotonic()
            threading.Thread(target=self._run, name="mini-infer-status", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        """No line comes after the one that is being written, for which nobody waits."""
        self._stopped.set()

    def line(self, now: float) -> str | None:
        """What happened between the last call and ``now``, in seconds of ``time.monotonic``.

        Prompts count when they are admitted, with what the prefix cache spares them. None where
        nothing runs, waits, or did since.
        """
        last, totals = self._last, self._metrics.totals()
        seconds, self._last, self._last_time = now - self._last_time, totals, now
        num_prompt_tokens = totals.prompt_tokens - last.prompt_tokens
        num_generated = totals.generation_tokens - last.generation_tokens
        if not (totals.num_running or totals.num_waiting or num_prompt_tokens or num_generated):
            return None
        queries = totals.prefix_cache_queries - last.prefix_cache_queries
        hits = totals.prefix_cache_hits - last.prefix_cache_hits
        hit_rate = f"{hits / queries:.1%}" if queries else "none looked up"
        drafts = ""
        if totals.drafts is not None and last.drafts is not None:
            drafts = f"; {describe(difference(totals.drafts, last.drafts))}"
        return (
            f"requests: {totals.num_running} running, {totals.num_waiting} waiting; "
            f"tokens/s: {num_prompt_tokens / seconds:.1f} prompt, "
            f"{num_generated / seconds:.1f} generation; "
            f"KV cache: {totals.kv_usage:.1%} in use; prefix hits: {hit_rate}{drafts}"
        )

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            line = self.line(time.monotonic())
            if line is not None:
                status_logger.info("%s", line)
