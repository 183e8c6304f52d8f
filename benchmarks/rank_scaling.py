"""Workloads on engines of one rank and of several: how fast, and whether the text is the same."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from client import Job
from gpu_measure import warm_up
from gpu_workloads import MIXED, Sizes
from harness import Bar, Value, median

from mini_infer import LLM, SamplingParams

PREFILL = "prefill"
WARM_BATCHES = (1, 8, 32)
Outputs = list[list[int]]


@dataclass
class Scaling:
    """By engine and workload: tokens a second of each repeat, and the last one's text."""

    rates: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    texts: dict[tuple[str, str], Outputs] = field(default_factory=dict)

    def measure(
        self, engine: str, llm: LLM, workloads: Iterable[str], repeats: int, shrink: int, seed: int
    ) -> None:
        """Runs the workloads, their lengths and counts divided by ``shrink``."""
        sizes = Sizes(llm.engine.config.model_config.vocab_size, shrink)
        warm_up(llm, WARM_BATCHES)
        for name in workloads:
            jobs = sizes.mixed() if name == MIXED else sizes.batch(name, seed)
            for _ in range(repeats):
                llm.engine.reset_prefix_cache()
                seconds, outputs = _greedy(llm, jobs)
                rate = _num_tokens(name, jobs) / seconds
                self.rates.setdefault((engine, name), []).append(rate)
                self.texts[engine, name] = outputs
                # A run of minutes that is cut short has said what it knows.
                print(f"{name}, {engine}: {rate:.1f} tokens/s", file=sys.stderr)

    def rate(self, engine: str, name: str) -> float | None:
        """The median; None where it was not measured."""
        found = self.rates.get((engine, name))
        return None if found is None else median(found)

    def row(self, name: str, engine: str, first: str) -> dict[str, Value]:
        """How ``engine`` fares beside the ``first`` one."""
        ours, theirs = self.texts[engine, name], self.texts[first, name]
        same = sum(mine == other for mine, other in zip(ours, theirs, strict=True))
        rate = median(self.rates[engine, name])
        return {
            "tok/s": rate,
            f"of {first}": rate / median(self.rates[first, name]),
            "same text": f"{same} of {len(ours)}",
        }

    def bar(self, name: str, engine: str, first: str, bar: float) -> Bar:
        """How many times as fast as the ``first`` one."""
        ours, theirs = self.rate(engine, name), self.rate(first, name)
        value = None if ours is None or theirs is None else ours / theirs
        return Bar(f"{engine}, {name}: times {first}", value, bar)


def _greedy(llm: LLM, jobs: Sequence[Job]) -> tuple[float, Outputs]:
    now = llm.engine.events.now
    params = [
        SamplingParams(temperature=0, max_tokens=job.num_output_tokens, ignore_eos=True)
        for job in jobs
    ]
    started = now()
    outputs = llm.generate([job.prompt_token_ids for job in jobs], params, use_tqdm=False)
    return now() - started, [output.outputs[0].token_ids for output in outputs]


def _num_tokens(name: str, jobs: Sequence[Job]) -> int:
    if name == PREFILL:
        return sum(len(job.prompt_token_ids) for job in jobs)
    return sum(job.num_output_tokens for job in jobs)
