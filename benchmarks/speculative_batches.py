"""Speculative decoding by batch size: its speed-up, adaptive and with a fixed number of drafts.

mini-infer bench speculative_batches --prompts spec_bench.jsonl --plot curve.svg
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from client import random_prompt
from harness import Bar, Report, Value, describe, make_parser, median, parse, positive, run
from speculation import (
    PLAIN,
    Tally,
    add_methods,
    add_prompts,
    answer_all,
    note_of_clock,
    open_engines,
    read_conversations,
    rotated,
    source_of,
    speculation_of,
)

from mini_infer import LLM, SamplingParams
from mini_infer.cli.load.plot import check_plot

NEVER_SLOWER_BAR = 0.98
BLOCK_SIZE = 16
WARM_UP_TOKENS = 16


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add_methods(parser)
    add_prompts(parser)
    parser.add_argument(
        "--random-tokens", action="store_true", help="as prompts: nobody can guess what follows"
    )
    parser.add_argument(
        "--batches", type=positive, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="requests"
    )
    parser.add_argument(
        "--requests", type=positive, default=16, help="of every batch size at least, in turns"
    )
    parser.add_argument("--prompt-tokens", type=positive, default=128, help="a prompt's last ones")
    parser.add_argument("--output-tokens", type=positive, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve (SVG, PNG)")
    arguments = parse(parser, argv, batches=[1, 2], requests=2, prompt_tokens=8, output_tokens=8)
    if arguments.plot is not None:
        check_plot(arguments.plot)
    speculations = {
        f"{method}, {'adaptive' if adaptive else 'fixed'}": speculation_of(
            arguments, method, adaptive=adaptive
        )
        for method in arguments.methods
        for adaptive in (True, False)
    }
    most = max(arguments.batches)
    num_prompts = max(most, arguments.requests)
    length = arguments.prompt_tokens + arguments.output_tokens
    report = Report("speculative_batches", "speed-up of drafts by batch size", {})
    runs: dict[tuple[str, int], list[Tally]] = defaultdict(list)
    configs = {PLAIN: None, **speculations}
    times = (arguments.repeats, 1) if arguments.reopen else (1, arguments.repeats)
    for sitting in range(times[0]):
        with open_engines(
            arguments,
            {name: configs[name] for name in rotated(list(configs), sitting)},
            max_model_len=length + BLOCK_SIZE,
            num_kv_blocks=num_prompts * (-(-length // BLOCK_SIZE) + 2) + 1,
            max_num_seqs=most,
            block_size=BLOCK_SIZE,
        ) as engines:
            report.setup = describe(
                arguments,
                engines[PLAIN].engine.config,
                cache="on, and warm: the same prompts were answered before",
                prompt_tokens=arguments.prompt_tokens,
                output_tokens=arguments.output_tokens,
                requests=arguments.requests,
                temperature=arguments.temperature,
                most_drafts=arguments.num_drafts,
                prompts="random tokens" if arguments.random_tokens else source_of(arguments),
            )
            prompts = _prompts(arguments, engines[PLAIN], num_prompts)
            for batch in arguments.batches:
                for llm in engines.values():
                    _answer(llm, prompts, batch, arguments, WARM_UP_TOKENS)
                for turn in range(times[1]):
                    for name in rotated(list(engines), sitting + turn):
                        tally = _answer(
                            engines[name], prompts, batch, arguments, arguments.output_tokens
                        )
                        runs[name, batch].append(tally)
    gains = _fill(report, arguments, list(speculations), runs)
    if arguments.plot is not None:
        title = f"{Path(arguments.model).name}, {report.setup['dtype']}"
        _plot(arguments.plot, title, arguments.batches, gains)
    report.finish(arguments.output)


def _answer(
    llm: LLM,
    prompts: list[list[int]],
    batch: int,
    arguments: argparse.Namespace,
    num_tokens: int,
) -> Tally:
    """Answers batches of prompts one after another, until enough of them are answered."""
    total = Tally()
    for first in range(0, max(batch, arguments.requests), batch):
        some = prompts[first : first + batch]
        params = [
            SamplingParams(
                temperature=arguments.temperature,
                max_tokens=num_tokens,
                ignore_eos=True,
                seed=first + row,
            )
            for row in range(len(some))
        ]
        total.include(answer_all(llm, some, params))
    return total


def _prompts(arguments: argparse.Namespace, llm: LLM, count: int) -> list[list[int]]:
    """Token ids of so many prompts, in a mixed order of the file's; from its first on again where
    it has too few."""
    rng = random.Random(arguments.seed)
    if arguments.random_tokens:
        size = llm.engine.config.model_config.vocab_size
        return [random_prompt(rng, size, arguments.prompt_tokens) for _ in range(count)]
    conversations = read_conversations(arguments.prompts)
    rng.shuffle(conversations)
    tokenizer = llm.engine.tokenizer
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": item.turns[0]}])
        for item in conversations
    ]
    return [
        tokenizer.encode(texts[index % len(texts)])[-arguments.prompt_tokens :]
        for index in range(count)
    ]


def _fill(
    report: Report,
    arguments: argparse.Namespace,
    names: Sequence[str],
    runs: dict[tuple[str, int], list[Tally]],
) -> dict[str, list[float]]:
    """Fills the report; returns each curve's speed-ups, batch by batch."""
    gains: dict[str, list[float]] = {name: [] for name in names}
    for batch in arguments.batches:
        plain = runs[PLAIN, batch]
        row: dict[str, Value] = {
            "batch": batch,
            "plain tok/s": median([item.tokens_per_second for item in plain]),
        }
        for name in names:
            drafted = runs[name, batch]
            pairs = list(zip(plain, drafted, strict=True))
            gain = median([one.decode_seconds / two.decode_seconds for one, two in pairs])
            drafts = drafted[-1].drafts
            rate = drafts.acceptance_rate
            row[f"{name}: speed-up"] = gain
            row[f"{name}: of all"] = median([one.seconds / two.seconds for one, two in pairs])
            row[f"{name}: accepted %"] = None if rate is None else 100 * rate
            row[f"{name}: drafts a token"] = drafts.num_draft_tokens / drafted[-1].num_tokens
            gains[name].append(gain)
        report.rows.append(row)
    for name in names:
        if name.endswith("adaptive"):
            report.bars.append(
                Bar(f"{name}: speed-up at the worst batch", min(gains[name]), NEVER_SLOWER_BAR)
            )
    report.notes += [
        "speed-up: of a request's mean time from its first token to its last; of all: of the time "
        "until all requests are answered; each is a median of ratios to the plain run beside it",
        *note_of_clock(arguments),
    ]
    report.samples = {
        f"{name}, {batch}": [item.decode_seconds for item in taken]
        for (name, batch), taken in runs.items()
    }
    return gains


def _plot(path: Path, title: str, batches: list[int], gains: dict[str, list[float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for place, (name, values) in enumerate(gains.items()):
        style = "--" if name.endswith("fixed") else "-"
        axes.plot(batches, values, style, marker="o", color=f"C{place // 2}", label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, list(map(str, batches)))
    axes.set_xlabel("batch")
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    run(main)
