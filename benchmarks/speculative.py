"""Speculative decoding by kind of prompt: acceptance and speed-up over plain decoding.

Asks prompts one at a time, each of every engine in turn, and compares the answers.

    mini-infer bench speculative --prompts spec_bench.jsonl --methods ngram early_exit
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from harness import Bar, Report, Value, describe, make_parser, parse, positive, run
from same_answers import Sameness, rounds_alike
from speculation import (
    PLAIN,
    Conversation,
    Tally,
    add_methods,
    add_prompts,
    note_of_clock,
    open_engines,
    read_conversations,
    rotated,
    source_of,
    speculation_of,
)

from mini_infer import LLM, SamplingParams
from mini_infer.core.outputs import RequestOutput

ALL = "all"
ACCEPTANCE_BAR = 60.0
SPEEDUP_BAR = 1.5
NEVER_SLOWER_BAR = 0.98
Tallies = dict[tuple[str, str], Tally]
"""By engine and category."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, repeats=1)
    add_methods(parser)
    add_prompts(parser)
    parser.add_argument("--limit", type=positive, help="prompts of a category; by default all")
    parser.add_argument("--max-tokens", type=positive, default=128, help="of an answer")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--max-model-len", type=positive, default=4096)
    parser.add_argument(
        "--fixed",
        action="store_true",
        help="draft --num-drafts tokens at each step, whatever it costs: shows what is accepted",
    )
    arguments = parse(parser, argv, limit=1, max_tokens=8)
    conversations = read_conversations(arguments.prompts, arguments.limit)
    speculations = {
        method: speculation_of(arguments, method, adaptive=not arguments.fixed)
        for method in arguments.methods
    }
    names = [PLAIN, *speculations]
    tallies: Tallies = defaultdict(Tally)
    same = {method: Sameness() for method in arguments.methods}
    is_exact = False
    report = Report("speculative", "drafts of real answers, batch 1", {})
    rounds = [
        (temperature, conversation)
        for _ in range(arguments.repeats)
        for temperature in arguments.temperatures
        for conversation in conversations
    ]
    num_sittings = min(len(names), len(rounds)) if arguments.reopen else 1
    sittings = [rounds[place::num_sittings] for place in range(num_sittings)]
    configs = {PLAIN: None, **speculations}
    for number, sitting in enumerate(sittings):
        with open_engines(
            arguments,
            {name: configs[name] for name in rotated(names, number)},
            max_model_len=arguments.max_model_len,
            num_kv_blocks=arguments.max_model_len // 16 + 8,
            max_num_seqs=1,
        ) as engines:
            report.setup = describe(
                arguments,
                engines[PLAIN].engine.config,
                cache="on; a conversation's next turn finds the one before",
                prompts=f"{len(conversations)}, {source_of(arguments)}",
                max_tokens=arguments.max_tokens,
                temperatures=" and ".join(f"{value:g}" for value in arguments.temperatures),
                most_drafts=arguments.num_drafts,
                drafts="fixed" if arguments.fixed else "adaptive",
            )
            _warm_up(engines)
            for turn, (temperature, conversation) in enumerate(sitting):
                row = _row(arguments, temperature, conversation)
                params = SamplingParams(
                    temperature=temperature, max_tokens=arguments.max_tokens, seed=turn
                )
                for answers in _talk(engines, rotated(names, turn), conversation, params):
                    plain, _ = answers[PLAIN]
                    for name, (output, seconds) in answers.items():
                        tallies[name, row].add(output, seconds)
                        if name in same:
                            prompt = plain.prompt_token_ids
                            same[name].add(prompt, _ids(plain), _ids(output), temperature == 0)
            is_exact = rounds_alike(engines[PLAIN].engine.config)
            for sameness in same.values():
                sameness.look(engines[PLAIN])
    rows = dict.fromkeys(_row(arguments, *item) for item in rounds)
    _fill(report, arguments, names, rows, tallies)
    for method, sameness in same.items():
        sameness.report(method, report, has_bar=is_exact)
    report.finish(arguments.output)


def _talk(
    engines: dict[str, LLM],
    order: Sequence[str],
    conversation: Conversation,
    params: SamplingParams,
) -> list[dict[str, tuple[RequestOutput, float]]]:
    """Each turn's answers and seconds, by engine; all go on from plain decoding's answer."""
    messages: list[dict[str, str]] = []
    answers = []
    for text in conversation.turns:
        messages.append({"role": "user", "content": text})
        found = {}
        for name in order:
            now = engines[name].engine.events.now
            started = now()
            [output] = engines[name].chat(messages, params, use_tqdm=False)
            found[name] = output, now() - started
        answers.append(found)
        messages.append({"role": "assistant", "content": found[PLAIN][0].outputs[0].text})
    return answers


def _row(arguments: argparse.Namespace, temperature: float, conversation: Conversation) -> str:
    """Where an answer counts."""
    several = len(arguments.temperatures) > 1
    return conversation.category + (f", temperature {temperature:g}" if several else "")


def _ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def _warm_up(engines: dict[str, LLM]) -> None:
    """First calls allocate and tune what later ones reuse."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for llm in engines.values():
        llm.chat([{"role": "user", "content": "Count to ten."}], params, use_tqdm=False)
        llm.engine.reset_prefix_cache()


def _fill(
    report: Report,
    arguments: argparse.Namespace,
    names: Sequence[str],
    rows: Iterable[str],
    tallies: Tallies,
) -> None:
    for name in names:
        total = Tally()
        for row in rows:
            total.include(tallies[name, row])
        tallies[name, ALL] = total
    slowest: dict[str, float] = {}
    for row in [*rows, ALL]:
        plain = tallies[PLAIN, row]
        shown: dict[str, Value] = {"prompts": row, "plain tok/s": plain.decoded_per_second}
        for method in arguments.methods:
            tally = tallies[method, row]
            gain = _ratio(tally.decoded_per_second, plain.decoded_per_second)
            shown[f"{method}: accepted %"] = _percent(tally.drafts.acceptance_rate)
            shown[f"{method}: of those reached %"] = _percent(tally.drafts.acceptance_of_reached)
            shown[f"{method}: length"] = tally.drafts.mean_accepted_length
            shown[f"{method}: speed-up"] = gain
            shown[f"{method}: with prompt"] = tally.tokens_per_second / plain.tokens_per_second
            if gain is not None and row != ALL:
                slowest[method] = min(gain, slowest.get(method, gain))
        report.rows.append(shown)
    report.notes += [
        "tok/s and speed-up are of decoding: tokens after the first, and the time from it to the "
        "last; with prompt: from request to answer",
        "of those reached: of the drafts before which none was rejected, however many are proposed",
        "length: tokens of a verification, its own one included; steps without drafts do not count",
        *note_of_clock(arguments),
    ]
    on_gpu = report.setup["machine"].get("gpu") is not None
    for method in arguments.methods:
        total = tallies[method, ALL]
        gain = _ratio(total.decoded_per_second, tallies[PLAIN, ALL].decoded_per_second)
        if method == "head":
            drafts = total.drafts
            for name, rate in (
                ("accepted", drafts.acceptance_rate),
                ("of those reached", drafts.acceptance_of_reached),
            ):
                report.bars.append(Bar(f"head: {name} %", _percent(rate), ACCEPTANCE_BAR))
            if on_gpu and not arguments.fixed:
                report.bars.append(Bar("head: speed-up", gain, SPEEDUP_BAR))
        if not arguments.fixed:
            worst = slowest.get(method)
            bar = Bar(f"{method}: speed-up of the slowest kind", worst, NEVER_SLOWER_BAR)
            report.bars.append(bar)
    report.samples = {f"{name}, {row}": asdict(tally) for (name, row), tally in tallies.items()}


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else value / other


if __name__ == "__main__":
    run(main)
