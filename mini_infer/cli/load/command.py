"""``mini-infer bench serve``: load on any server of OpenAI's API, and how it bears it."""

import json
import os
import random
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mini_infer.cli.load.arrivals import arrival_times
from mini_infer.cli.load.client import PATHS, Record, open_session
from mini_infer.cli.load.figures import Objective, figures
from mini_infer.cli.load.plot import check_plot, save_plot
from mini_infer.cli.load.report import print_figures, to_json
from mini_infer.cli.load.run import Job, Target, run_loop, send_all
from mini_infer.cli.load.trace import trace_jobs
from mini_infer.cli.load.workload import (
    Lengths,
    Words,
    prefix_jobs,
    prompt_jobs,
    random_jobs,
    repeated,
    sharegpt_jobs,
    tokens_per_word,
)
from mini_infer.core.errors import InvalidConfigError

if TYPE_CHECKING:
    import aiohttp

DATASETS = ("random", "prefix", "prompts", "sharegpt", "trace")
FILE = click.Path(path_type=Path, dir_okay=False)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the command was told; names are the options'."""

    base_url: str
    endpoint: str
    model: str | None
    api_key: str | None
    dataset: str
    file: Path | None
    num_prompts: int
    input_tokens: int
    output_tokens: int
    spread: float
    num_prefixes: int
    prefix_tokens: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    speed: float
    shrink: float
    temperature: float
    ignore_eos: bool
    extra_body: str | None
    seed: int

    def fields(self) -> dict[str, Any]:
        """What every request says besides its prompt.

        Raises:
            InvalidConfigError: ``extra_body`` is no JSON object.
        """
        extra = {}
        if self.extra_body is not None:
            with suppress(ValueError):
                extra = json.loads(self.extra_body)
            if not isinstance(extra, dict) or not extra:
                raise InvalidConfigError('--extra-body must be a JSON object such as {"top_k": 5}')
        fields = {"model": self.model, "temperature": self.temperature}
        return fields | ({"ignore_eos": True} if self.ignore_eos else {}) | extra

    def jobs(self, words: Words) -> list[Job]:
        """The workload with its arrival times.

        Raises:
            InvalidConfigError: options that don't go together, or a file that can't be read.
        """
        rng = random.Random(self.seed)
        if self.file is None and self.dataset not in ("random", "prefix"):
            raise InvalidConfigError(f"--dataset {self.dataset} needs a --file")
        if self.file is not None and self.dataset == "trace":
            return trace_jobs(
                self.file,
                words,
                self.num_prompts,
                speed=self.speed,
                shrink=self.shrink,
                seed=self.seed,
            )
        jobs = repeated(self._jobs(words, rng), self.num_prompts)
        times = arrival_times(len(jobs), self.request_rate, self.burstiness, rng)
        return [replace(job, arrival=time) for job, time in zip(jobs, times, strict=True)]

    def _jobs(self, words: Words, rng: random.Random) -> Iterable[Job]:
        lengths = Lengths(self.input_tokens, self.output_tokens, self.spread)
        if self.dataset == "prefix":
            return prefix_jobs(words, lengths, rng, self.num_prefixes, self.prefix_tokens)
        if self.file is not None and self.dataset == "prompts":
            return prompt_jobs(self.file, lengths, rng)
        if self.file is not None and self.dataset == "sharegpt":
            return sharegpt_jobs(self.file, words, rng)
        return random_jobs(words, lengths, rng)


@click.command("serve")
@click.option(
    "--base-url", default="http://127.0.0.1:8000", show_default=True, help="Of the server."
)
@click.option(
    "--endpoint", type=click.Choice(tuple(PATHS)), default="chat", show_default=True, help="API."
)
@click.option("--model", help="Name of the model. [default: the server's first]")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Key; better in OPENAI_API_KEY.")
@click.option(
    "--dataset", type=click.Choice(DATASETS), default="random", show_default=True, help="Prompts."
)
@click.option("--file", type=FILE, help="Of the datasets prompts, sharegpt and trace.")
@click.option(
    "--num-prompts", type=click.IntRange(1), default=100, show_default=True, help="Requests."
)
@click.option(
    "--input-tokens", type=click.IntRange(1), default=256, show_default=True, help="Of a prompt."
)
@click.option(
    "--output-tokens", type=click.IntRange(1), default=128, show_default=True, help="Of an answer."
)
@click.option(
    "--spread",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Lengths are uniform within this share around their mean.",
)
@click.option(
    "--num-prefixes", type=click.IntRange(1), default=8, show_default=True, help="Of prefix."
)
@click.option(
    "--prefix-tokens", type=click.IntRange(1), default=512, show_default=True, help="Of prefix."
)
@click.option(
    "--request-rate",
    type=float,
    default=float("inf"),
    show_default=True,
    help="Requests a second; inf: all at once.",
)
@click.option(
    "--burstiness",
    type=float,
    default=1.0,
    show_default=True,
    help="Of arrivals: 1 is a Poisson process, less is burstier (gamma-distributed gaps).",
)
@click.option("--max-concurrency", type=click.IntRange(1), help="Most requests at a time.")
@click.option("--speed", type=float, default=1.0, show_default=True, help="Of a trace's arrivals.")
@click.option(
    "--shrink", type=float, default=1.0, show_default=True, help="Divides a trace's lengths."
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="Of sampling.")
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Answers run to their full length; not every server knows the field.",
)
@click.option("--extra-body", metavar="JSON", help="Further fields of each request.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and arrivals.")
@click.option(
    "--goodput",
    multiple=True,
    metavar="METRIC:MS",
    help="Objectives, such as ttft:200 tpot:50, that a good request meets; also itl and e2el.",
)
@click.argument("more_objectives", nargs=-1, metavar="[METRIC:MS]...")
@click.option("--output", type=FILE, help="Write figures and requests as JSON.")
@click.option("--plot", type=FILE, help="Draw the latencies, as .png or .svg for example.")
def serve(
    goodput: tuple[str, ...],
    more_objectives: tuple[str, ...],
    output: Path | None,
    plot: Path | None,
    **options: Any,
) -> int:
    """Send requests to a server of OpenAI's API and report latencies, throughput and goodput.

    Figures are those of vLLM's command of the same name. Exits with 1 if a request failed.
    """
    load = LoadOptions(**options)
    objectives = [Objective.parse(text) for text in (*goodput, *more_objectives)]
    if more_objectives and not goodput:
        raise InvalidConfigError(f"unexpected {more_objectives[0]!r:.80}: say --goodput before it")
    if plot is not None:
        check_plot(plot)
    for option, path in (("--output", output), ("--plot", plot)):
        if path is not None:
            check_writable(path, option)
    target, jobs, records = run_loop(run_load(load))
    found = figures(records, objectives)
    print_figures(found, objectives)
    if output is not None:
        settings = {**options, "model": target.fields["model"], "goodput": goodput}
        _write(output, to_json(settings, jobs, records, found))
    if plot is not None:
        title = f"{target.fields['model']}: {len(jobs)} requests, {load.request_rate:g} a second"
        save_plot(plot, records, objectives, title)
    return 1 if found["failed"] else 0


async def run_load(load: LoadOptions) -> tuple[Target, list[Job], list[Record]]:
    """Finds out about the server, then sends all of it, with a progress bar.

    Raises:
        InvalidConfigError: options that can't work.
        MiniInferError: the server does not serve.
    """
    from tqdm import tqdm

    fields = load.fields()
    load.jobs(Words())  # a mistake shows before anything is sent
    async with open_session(load.api_key) as session:
        target = Target(load.base_url, load.endpoint, fields)
        if load.model is None:
            model = await first_model(session, target)
            target = replace(target, fields=fields | {"model": model})
        jobs = load.jobs(Words(await tokens_per_word(session, target)))
        with tqdm(total=len(jobs), unit="request", disable=not sys.stderr.isatty()) as progress:
            records = await send_all(
                session,
                target,
                jobs,
                max_concurrency=load.max_concurrency,
                on_record=lambda record: progress.update(),
            )
    return target, jobs, records


async def first_model(session: "aiohttp.ClientSession", target: Target) -> str:
    """The first model that the server lists.

    Raises:
        InvalidConfigError: nobody answers there, or not with a list of models.
    """
    import aiohttp

    url = target.url.removesuffix(PATHS[target.endpoint]) + "/v1/models"
    try:
        async with session.get(url) as response:
            if response.status == 401:
                raise InvalidConfigError("the server wants an --api-key, best in OPENAI_API_KEY")
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientConnectionError, OSError, ValueError) as error:
        if isinstance(error, InvalidConfigError):
            raise
        raise InvalidConfigError(
            f"can't reach a server at --base-url {target.base_url}: {error}"
        ) from None
    except (aiohttp.ClientError, KeyError, IndexError, TypeError):
        raise InvalidConfigError(f"{url} lists no model: give its name with --model") from None


def check_writable(path: Path, option: str) -> None:
    """Raises InvalidConfigError: no file can be written there. Called before a run, so that an hour
    of it is not lost."""
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidConfigError(f"can't write {option} {path}: no such folder, or not allowed to")


def _write(path: Path, value: Sequence[Any] | dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidConfigError(f"can't write --output {path}: {error.strerror}") from None
