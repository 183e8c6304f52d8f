"""Requests held to a form against free ones: tokens per second, and the time of their masks.

The forms never end by themselves, so all workloads have equally many tokens and steps. "mask" is
the time per step in which the rows' masks are filled, which a GPU spends on the step's logits.

    mini-infer bench structured_output --batches 1 8 32
"""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from client import random_prompt
from harness import Bar, Report, describe, make_parser, median, open_engine, parse, positive, run

from mini_infer import LLM, SamplingParams, StructuredOutputsParams
from mini_infer.runtime import grammar_requests

FREE = "free"
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "other"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
RECORDS = {"type": "array", "items": RECORD, "minItems": 10_000}
SUMS = 'root ::= (sum "\\n"){10000}\nsum ::= n | n " + " sum\nn ::= [0-9]{1,4} | "(" sum ")"'
FORMS: dict[str, StructuredOutputsParams | None] = {
    FREE: None,
    "JSON schema": StructuredOutputsParams(json=RECORDS),
    "regex": StructuredOutputsParams(regex=r"([A-Z][a-z]{1,9}( [a-z]{1,9}){2,8}\. ){10000}"),
    "grammar": StructuredOutputsParams(grammar=SUMS),
}
BAR = 0.9
BAR_FORM = "JSON schema"


@dataclass(frozen=True)
class Run:
    """One batch of requests of one form."""

    tokens_per_s: float
    mask_ms: float
    """Per step, all rows."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=positive, default=64)
    parser.add_argument("--output-tokens", type=positive, default=128)
    arguments = parse(parser, argv, batches=[1, 2], output_tokens=8)
    runs: dict[tuple[int, str], list[Run]] = {}
    with open_engine(
        arguments,
        max_model_len=arguments.prompt_tokens + arguments.output_tokens,
        max_num_seqs=max(arguments.batches),
    ) as llm:
        compile_ms = {name: _compile(llm, form) for name, form in FORMS.items() if form is not None}
        for batch in arguments.batches:
            for repeat in range(arguments.repeats + 1):  # the first one warms up
                for name, form in FORMS.items():
                    measured = _run(llm, arguments, batch, form)
                    if repeat:
                        runs.setdefault((batch, name), []).append(measured)
        report = Report(
            "structured_output",
            "requests held to a form against free ones",
            describe(
                arguments,
                llm.engine.config,
                cache="empty",
                prompt_tokens=arguments.prompt_tokens,
                output_tokens=arguments.output_tokens,
            ),
        )
    for (batch, name), results in runs.items():
        free = median([item.tokens_per_s for item in runs[batch, FREE]])
        rate = median([item.tokens_per_s for item in results])
        report.rows.append(
            {
                "batch": batch,
                "form": name,
                "output tok/s": rate,
                "of free": rate / free,
                "mask ms": None if name == FREE else median([item.mask_ms for item in results]),
                "compile ms": compile_ms.get(name),
            }
        )
    largest = max(arguments.batches)
    [held] = [row for row in report.rows if (row["batch"], row["form"]) == (largest, BAR_FORM)]
    value = held["of free"]
    assert isinstance(value, float)
    report.bars.append(Bar(f"{BAR_FORM} of free, batch {largest}", value, at_least=BAR))
    report.samples = {
        f"{name} {batch}": [asdict(item) for item in results]
        for (batch, name), results in runs.items()
    }
    report.finish(arguments.output)


def _compile(llm: LLM, form: StructuredOutputsParams) -> float:
    """Milliseconds; the vocabulary, which is read with the first grammar, does not count."""
    check = llm.engine.input_processor._grammars.check
    check(StructuredOutputsParams(regex="a"))
    started = time.perf_counter()
    check(form)
    return 1e3 * (time.perf_counter() - started)


def _run(llm: LLM, arguments: Any, batch: int, form: StructuredOutputsParams | None) -> Run:
    rng = random.Random(arguments.seed)
    vocab_size = llm.engine.config.model_config.vocab_size
    prompts = [random_prompt(rng, vocab_size, arguments.prompt_tokens) for _ in range(batch)]
    params = SamplingParams(
        temperature=0.8, seed=arguments.seed, max_tokens=arguments.output_tokens, ignore_eos=True
    )
    params = replace(params, structured_outputs=form)
    llm.engine.reset_prefix_cache()
    with _timed_masks() as spent:
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert num_tokens == batch * arguments.output_tokens, "a form came to its end"
    return Run(num_tokens / seconds, 1e3 * spent["seconds"] / max(1, spent["steps"]))


@contextmanager
def _timed_masks() -> Iterator[Counter[str]]:
    spent: Counter[str] = Counter()
    original = grammar_requests.fill_masks

    def fill_masks(*arguments: Any) -> bytearray:
        started = time.perf_counter()
        masks = original(*arguments)
        spent["seconds"] += time.perf_counter() - started  # type: ignore[assignment]
        spent["steps"] += 1
        return masks

    grammar_requests.fill_masks = fill_masks  # type: ignore[assignment]
    try:
        yield spent
    finally:
        grammar_requests.fill_masks = original


if __name__ == "__main__":
    run(main)
