"""Greedy text of the default dtype against float32's: how many of the first tokens agree.

A position after the first difference counts as a difference, so this is a harsh measure: two
continuations that part at their tenth token share nine of 32.

    mini-infer bench dtype_agreement --output benchmarks/results/dtype_agreement.json
"""

import argparse
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from harness import Bar, Report, describe, make_parser, open_engine, parse, positive, run

from mini_infer import SamplingParams

AGREEMENT_BAR = 90.0
SUBJECTS = (
    "a lighthouse",
    "the water cycle",
    "a bakery at dawn",
    "the number seven",
    "an old bicycle",
    "the city of Lisbon",
    "a chess match",
    "winter in the mountains",
    "a violin",
    "the smell of rain",
)
KINDS = (
    "Here is a short story about {}. One morning,",
    "Question: What should a child know about {}?\nAnswer:",
    "A list of five facts about {}:\n1.",
    "# A Python function that prints a poem about {}\ndef print_poem():\n",
    "Dear editor, I am writing to you because of {}.",
)
PROMPTS = tuple(kind.format(subject) for subject in SUBJECTS for kind in KINDS)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, repeats=1)
    parser.add_argument("--prompts", type=positive, default=len(PROMPTS))
    parser.add_argument("--output-tokens", type=positive, default=32)
    arguments = parse(parser, argv, prompts=10)
    prompts = PROMPTS[: arguments.prompts]
    outputs, setup = _generate(arguments, prompts)
    reference, _ = _generate(arguments, prompts, dtype="float32")
    agreeing = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
        for ours, theirs in zip(outputs, reference, strict=True)
    ]
    lengths = [max(len(ours), len(theirs)) for ours, theirs in zip(outputs, reference, strict=True)]
    partings = [same for same, length in zip(agreeing, lengths, strict=True) if same < length]
    percent = 100 * sum(agreeing) / sum(lengths)
    report = Report("dtype_agreement", "greedy tokens, default dtype against float32", setup)
    report.rows.append(
        {
            "dtype": setup["dtype"],
            "prompts": len(prompts),
            "positions": sum(lengths),
            "agreeing %": percent,
            "identical outputs": len(prompts) - len(partings),
            "earliest difference after": min(partings, default=None),
        }
    )
    report.bars.append(Bar("positions that agree with float32, %", percent, AGREEMENT_BAR))
    report.finish(arguments.output)


def _generate(
    arguments: argparse.Namespace, prompts: Sequence[str], **options: str
) -> tuple[list[list[int]], dict[str, Any]]:
    """Greedy token ids; they end early only where the model ends its text."""
    params = SamplingParams(temperature=0, max_tokens=arguments.output_tokens)
    with open_engine(arguments, max_model_len=128 + arguments.output_tokens, **options) as llm:
        outputs = llm.generate(list(prompts), params, use_tqdm=False)
        setup = describe(
            arguments,
            llm.engine.config,
            cache="on, empty at the start",
            prompts=len(prompts),
            output_tokens=arguments.output_tokens,
        )
    return [output.outputs[0].token_ids for output in outputs], setup


if __name__ == "__main__":
    run(main)
