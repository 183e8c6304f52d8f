"""Speculative decoding with an acceptance that is given: is the speed-up the cost model's?

Random weights have no acceptance worth the name. Here a draft is accepted by a coin that belongs to
its place in its request, whatever the draft and the model say: so steps cost what they cost, and
bring what they are meant to.

    mini-infer bench speculative_forced --output benchmarks/results/speculative_forced.json
"""

import argparse
import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from client import random_prompt
from harness import (
    Bar,
    Report,
    Value,
    bundled_model,
    describe,
    make_parser,
    median,
    parse,
    positive,
    require_gpu,
    run,
)
from speculation import (
    PLAIN,
    Tally,
    add_methods,
    answer_all,
    note_of_clock,
    open_engines,
    rotated,
    speculation_of,
)
from torch import Tensor

from mini_infer import SamplingParams
from mini_infer.core.json_file import read_json_object
from mini_infer.core.speculative_config import MAX_DRAFTS, MAX_SPECULATING_ROWS
from mini_infer.kernels import ops
from mini_infer.modeling.model_files import locate_model
from mini_infer.runtime.speculation.controller import DraftController

ACCEPTANCE = 0.5585
TOLERANCE_BAR = 10.0
BLOCK_SIZE = 16
ADAPTIVE = "adaptive"


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add_methods(parser)
    parser.set_defaults(
        load_format="dummy",
        model=bundled_model("qwen2.5-7b"),
        methods=["draft_model"],
        draft_model=bundled_model("qwen2.5-0.5b"),
        num_drafts=8,
    )
    parser.add_argument("--acceptance", type=float, default=ACCEPTANCE, help="of a draft, 0 to 1")
    parser.add_argument("--drafts", type=positive, nargs="+", default=[1, 2, 4, 8], help="fixed")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 4, 16], help="requests")
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--output-tokens", type=positive, default=256)
    arguments = parse(parser, argv, drafts=[2], batches=[1], prompt_tokens=8, output_tokens=16)
    require_gpu(arguments.device)
    arguments.num_drafts = max(arguments.num_drafts, *arguments.drafts)
    report = Report("speculative_forced", "measured speed-up beside the cost model's", {})
    with accepting(arguments.acceptance), tempfile.TemporaryDirectory() as folder:
        arguments.draft_model = _with_vocabulary(arguments, Path(folder))
        for method in arguments.methods:
            _measure(arguments, method, report)
    ratios = [row["measured / predicted"] for row in report.rows]
    errors = [100 * abs(ratio - 1) for ratio in ratios if isinstance(ratio, float)]
    report.bars.append(
        Bar("off the prediction by %", max(errors, default=None), at_most=TOLERANCE_BAR)
    )
    report.finish(arguments.output)


def _measure(arguments: argparse.Namespace, method: str, report: Report) -> None:
    """All batches and numbers of drafts of one method, in one run, beside plain decoding."""
    most = max(arguments.batches)
    length = arguments.prompt_tokens + arguments.output_tokens
    with open_engines(
        arguments,
        {PLAIN: None, method: speculation_of(arguments, method)},
        max_model_len=length + BLOCK_SIZE,
        num_kv_blocks=most * (-(-length // BLOCK_SIZE) + 4) + 1,
        max_num_seqs=most,
        block_size=BLOCK_SIZE,
    ) as engines:
        config = engines[PLAIN].engine.config
        report.setup = describe(
            arguments,
            config,
            cache="on, and warm: the same prompts were answered before",
            prompt_tokens=arguments.prompt_tokens,
            output_tokens=arguments.output_tokens,
            forced_acceptance=arguments.acceptance,
            draft=Path(arguments.draft_model).name if method == "draft_model" else method,
        )
        rng = random.Random(arguments.seed)
        size = config.model_config.vocab_size
        prompts = [random_prompt(rng, size, arguments.prompt_tokens) for _ in range(most)]
        params = SamplingParams(temperature=0, max_tokens=arguments.output_tokens, ignore_eos=True)
        names = [PLAIN, *map(str, arguments.drafts), ADAPTIVE]
        turn = 0
        for batch in arguments.batches:
            runs: dict[str, list[Tally]] = defaultdict(list)
            for repeat in range(-1, arguments.repeats):  # the first is a warm-up
                for name in rotated(names, turn):
                    llm = engines[PLAIN if name == PLAIN else method]
                    with drafting(int(name)) if name.isdigit() else nullcontext():
                        tally = answer_all(llm, prompts[:batch], params)
                    if repeat >= 0:
                        runs[name].append(tally)
                turn += 1
            report.rows += [
                _row(method, name, batch, runs[name], runs[PLAIN]) for name in names[1:]
            ]
            report.samples |= {
                f"{method}, {name}, {batch}": [item.decode_seconds for item in taken]
                for name, taken in runs.items()
            }
    report.notes += [
        "predicted: by the step times measured at the engine's start, for the drafts that each "
        "step had and the tokens that it brought; speed-up: of a request's mean time from its "
        "first token to its last",
        *note_of_clock(arguments),
    ]


@contextmanager
def drafting(count: int) -> Iterator[None]:
    """Device proposers propose so many drafts at each step within it, whatever pays."""
    chosen = DraftController.num_drafts

    def fixed(self: DraftController, num_rows: int, most: int = MAX_DRAFTS) -> int:
        return min(count, most) if 1 <= num_rows <= MAX_SPECULATING_ROWS else 0

    DraftController.num_drafts = fixed  # type: ignore[method-assign]
    try:
        yield
    finally:
        DraftController.num_drafts = chosen  # type: ignore[method-assign]


def _with_vocabulary(arguments: argparse.Namespace, folder: Path) -> str:
    """The draft's configuration, with as many tokens as the target's where it has another number:
    models of one tokenizer pad their tables to different sizes. Written to a part of ``folder``
    that has the draft's name."""
    target, draft = (
        read_json_object(locate_model(name).folder / "config.json")
        for name in (arguments.model, arguments.draft_model)
    )
    draft["vocab_size"] = target["vocab_size"]
    made = folder / Path(arguments.draft_model).name
    made.mkdir()
    (made / "config.json").write_text(json.dumps(draft))
    return str(made)


def predicted_speedup(tally: Tally) -> float | None:
    """By the cost model, steps without drafts included; None where it knows no times."""
    drafts = tally.drafts
    if not drafts.plain_seconds:
        return None
    verified = drafts.num_verifications + drafts.num_accepted_tokens
    plain_each = drafts.plain_seconds / verified
    plain_steps = (tally.num_decoded - verified) * plain_each
    return tally.num_decoded * plain_each / (drafts.seconds + plain_steps)


def _row(
    method: str, name: str, batch: int, runs: Sequence[Tally], plain: Sequence[Tally]
) -> dict[str, Value]:
    gain = median(
        [
            before.decode_seconds / after.decode_seconds
            for before, after in zip(plain, runs, strict=True)
        ]
    )
    drafts, predicted = runs[-1].drafts, predicted_speedup(runs[-1])
    rate, length = drafts.acceptance_rate, drafts.mean_accepted_length
    return {
        "method": method,
        "batch": batch,
        "drafts": name,
        "plain ms a step": 1000
        * median([item.decode_seconds / item.num_decoded for item in plain]),
        "accepted %": None if rate is None else 100 * rate,
        "length": length,
        "speed-up": gain,
        "predicted": predicted,
        "measured / predicted": None if predicted is None else gain / predicted,
    }


@contextmanager
def accepting(share: float) -> Iterator[None]:
    """Engines that are built within it accept this share of drafts, by the coins of their places.

    What the model sampled becomes the draft where the coin says so, and another token elsewhere;
    then the engine's own comparison takes its course. Only tensor operations, so that a CUDA graph
    may hold them.
    """
    accept = ops.accept_drafts_

    def forced(
        token_ids: Tensor,
        first_samples: Tensor,
        num_drafts: Tensor,
        slots: Tensor,
        starts: Tensor,
        token_table: Tensor,
        last_positions: Tensor,
    ) -> Tensor:
        samples = torch.arange(len(token_ids), device=token_ids.device)
        row = torch.searchsorted(first_samples, samples, right=True) - 1  # whose sample it is
        row = row.clamp_min(0)
        offsets = samples - first_samples[row]
        places = starts[row] + offsets
        is_draft = offsets < num_drafts[row]
        drafts = token_table[slots[row], places.clamp_max(token_table.shape[1] - 1)].long()
        another = torch.where(drafts > 0, drafts - 1, drafts + 1)
        wanted = torch.where(coin(slots[row], places) < share, drafts, another)
        token_ids.copy_(torch.where(is_draft, wanted, token_ids))
        return accept(
            token_ids, first_samples, num_drafts, slots, starts, token_table, last_positions
        )

    ops.accept_drafts_ = forced
    try:
        yield
    finally:
        ops.accept_drafts_ = accept


def coin(slots: Tensor, places: Tensor) -> Tensor:
    """Float64 ``[N]`` in [0, 1), as if drawn for each slot and place (splitmix64's finaliser)."""
    x = (slots << 32) + places + 1
    for factor, shift in ((-0x40A7B892E31B1A47, 30), (-0x6B2FB644ECCEEE15, 27)):
        x = (x ^ _shifted(x, shift)) * factor
    return (_shifted(x ^ _shifted(x, 31), 11)).double() / 2**53


def _shifted(x: Tensor, count: int) -> Tensor:
    """A shift to the right of int64, without its sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


if __name__ == "__main__":
    run(main)
