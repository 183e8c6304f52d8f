"""Reads a torch profiler trace: which kernels ran, what each added to the time, which layer."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_LAYERS = "num_layers"
"""Key of the trace's metadata: how often a layer's kernels repeat."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Kernel:
    """One launch; microseconds."""

    name: str
    grid: tuple[int, ...]
    """Thread blocks; () for a copy."""
    start: float
    end: float
    added: float
    """From the end of all that came before to its own: what it adds to the whole, also where it
    overlaps its predecessor. The sum over kernels is the time from first to last."""
    idle: float
    """The part of ``added`` in which nothing ran."""
    launch: int
    """Equal for all kernels of one CUDA graph's replay."""


@dataclass(frozen=True)
class Layers:
    """Kernels ``first`` to ``first + period * count`` are ``count`` equal layers."""

    first: int
    period: int
    count: int


@dataclass(frozen=True)
class Trace:
    """A file's content."""

    data: dict[str, Any]

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """``path`` may be compressed, by its name."""
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            return cls(json.load(file))

    def save(self, path: Path) -> None:
        with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8") as file:
            json.dump(self.data, file)

    @property
    def events(self) -> list[dict[str, Any]]:
        return self.data["traceEvents"]  # type: ignore[no-any-return]

    @property
    def num_layers(self) -> int:
        """0 where nobody said."""
        return int(self.data.get(NUM_LAYERS, 0))

    @property
    def steps(self) -> list[str]:
        """The names of the steps in it."""
        return [
            event["name"]
            for event in self.events
            if event.get("cat") == "user_annotation" and event["name"].startswith("step ")
        ]

    def kernels(self) -> list[Kernel]:
        """In order of their starts."""
        found = [event for event in self.events if event.get("cat") in ON_DEVICE]
        found.sort(key=lambda event: event["ts"])
        kernels = []
        done = found[0]["ts"] if found else 0.0
        for event in found:
            start, end = event["ts"], event["ts"] + event["dur"]
            kernels.append(
                Kernel(
                    name=event["name"],
                    grid=tuple(event["args"].get("grid", ())),
                    start=start,
                    end=end,
                    added=max(end - done, 0.0),
                    idle=max(start - done, 0.0),
                    launch=event["args"].get("correlation", 0),
                )
            )
            done = max(done, end)
        return kernels

    def operators(self) -> dict[str, list[float]]:
        """Of a CPU: name to the microseconds of each call, without those that it called."""
        times: dict[str, list[float]] = defaultdict(list)
        threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for event in self.events:
            if event.get("cat") == "cpu_op":
                threads[event["tid"]].append(event)
        for events in threads.values():
            for name, own in _own_times(events):
                times[name].append(own)
        return times


def _own_times(events: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    own = [event["dur"] for event in events]
    open_calls: list[int] = []
    for index, event in enumerate(events):
        while open_calls:
            parent = events[open_calls[-1]]
            if event["ts"] < parent["ts"] + parent["dur"]:
                own[open_calls[-1]] -= event["dur"]
                break
            open_calls.pop()
        open_calls.append(index)
    return zip((event["name"] for event in events), own, strict=True)


def find_layers(names: Sequence[Any], count: int) -> Layers | None:
    """The shortest sequence that stands ``count`` times in a row, which is what a layer's kernels
    do; None where there is none."""
    if count < 2:
        return None
    for period in range(1, len(names) // count + 1):
        run = 0  # places in a row that hold the same as those a period later
        for place in range(len(names) - period):
            run = run + 1 if names[place] == names[place + period] else 0
            if run == period * (count - 1):
                return Layers(place + 1 - run, period, count)
    return None


def replays(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels of each CUDA graph's replay, that is, of each launch that started several."""
    launches: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        launches[kernel.launch].append(kernel)
    return [group for group in launches.values() if len(group) > 1]


def name_layers(path: Path) -> None:
    """Adds a range for each layer inside replayed graphs, which run no Python that could name it.

    They are on a track of their own beside the kernels.
    """
    trace = Trace.load(path)
    device = next((event["pid"] for event in trace.events if event.get("cat") == "kernel"), None)
    added = []
    for group in replays(trace.kernels()):
        layers = find_layers([kernel.name for kernel in group], trace.num_layers)
        if layers is None:
            continue
        for index in range(layers.count):
            first = layers.first + index * layers.period
            members = group[first : first + layers.period]
            end = max(kernel.end for kernel in members)
            start = end - sum(kernel.added for kernel in members) + members[0].idle
            added.append(
                {
                    "ph": "X",
                    "cat": "gpu_user_annotation",
                    "name": f"layer {index}",
                    "pid": device,
                    "tid": "layers",
                    "ts": start,
                    "dur": end - start,
                }
            )
    if added:
        trace.events.extend(added)
        trace.save(path)
