"""What benchmarks of speculative decoding share: who drafts, prompts of a file, counts."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import open_engine, positive

from mini_infer import LLM, SamplingParams
from mini_infer.core.draft_counts import DraftCounts
from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.outputs import RequestOutput

PLAIN = "plain"


@dataclass(frozen=True)
class Conversation:
    """What a user says, turn by turn."""

    category: str
    turns: tuple[str, ...]


EXAMPLES = (
    Conversation(
        "quoting",
        (
            "Correct the spelling, and repeat the text otherwise word for word: The libary on the "
            "corner opens at nine. In the libary there are two thousand books, and a cat that "
            "sleeps on the books. When the libary closes, the cat goes home.",
            "Repeat it once more, in capital letters.",
        ),
    ),
    Conversation(
        "quoting",
        (
            "Make a list of the names and towns in this text: Ada lives in Bristol and works with "
            "Bela, who comes from Pecs. Chidi lives in Lagos; his brother Dayo moved to Bristol, "
            "where he met Ada.",
        ),
    ),
    Conversation(
        "code",
        (
            "Write a Python class for a bank account: deposit, withdraw and balance.",
            "Add a method that transfers money to another account.",
        ),
    ),
    Conversation("code", ("Write the SQL of a table of books, and five rows to insert.",)),
    Conversation("questions", ("Why is the sky blue in the day and red in the evening?",)),
    Conversation("questions", ("What should I see in Rome if I have only one day?",)),
    Conversation("stories", ("Tell a story about a lighthouse keeper who is afraid of the dark.",)),
    Conversation("stories", ("Write a letter from a snail to a hare.",)),
)


def add_methods(parser: argparse.ArgumentParser) -> None:
    """The options that say who drafts."""
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["ngram"],
        help="ngram, early_exit, head, draft_model, or module:Class",
    )
    parser.add_argument("--head", help="folder that mini-infer train-draft wrote, for head")
    parser.add_argument("--draft-model", help="as for mini-infer serve --model, for draft_model")
    parser.add_argument("--exit-layers", type=positive, help="of early_exit; by default a third")
    parser.add_argument("--num-drafts", type=positive, default=4, help="most drafts of a step")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="instead of the wall's: on a CPU that others use, too, with --threads 1",
    )
    parser.add_argument(
        "--reopen",
        action="store_true",
        help="engines anew, in another order, a few times or at each repeat: on a CPU some are "
        "faster by a few percent, by where their weights lie",
    )


def speculation_of(arguments: argparse.Namespace, method: str, **more: Any) -> dict[str, Any]:
    """``speculative_config`` of a method."""
    own = {
        "head": {"model": arguments.head},
        "draft_model": {"model": arguments.draft_model},
        "early_exit": {"num_layers": arguments.exit_layers},
    }
    given = {"method": method, "num_speculative_tokens": arguments.num_drafts}
    return given | own.get(method, {}) | more


@contextmanager
def open_engines(
    arguments: argparse.Namespace,
    speculations: Mapping[str, dict[str, Any] | None],
    **options: Any,
) -> Iterator[dict[str, LLM]]:
    """An engine for each, by name, all at once: so their runs can alternate.

    Their events are stamped by ``clock_of(arguments)``.

    Raises:
        InvalidConfigError: time of one processor is asked for where more of them compute.
    """
    if arguments.processor_time and arguments.threads > 1:
        raise InvalidConfigError("--processor-time needs --threads 1: it adds up all threads")
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                open_engine(arguments, traced=False, speculative_config=speculation, **options)
            )
            for name, speculation in speculations.items()
        }
        for llm in engines.values():
            if arguments.processor_time and llm.engine.config.device != "cpu":
                raise InvalidConfigError("--processor-time is for a CPU, with --device cpu")
            llm.engine.events.now = clock_of(arguments)
        yield engines


def clock_of(arguments: argparse.Namespace) -> Callable[[], float]:
    """The clock that measures, in seconds."""
    return time.process_time if arguments.processor_time else time.monotonic


def note_of_clock(arguments: argparse.Namespace) -> list[str]:
    """What a report has to say about its clock."""
    if not arguments.processor_time:
        return []
    return ["times are the seconds that this process had of its processor: others used it, too"]


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """The option that says what is asked."""
    parser.add_argument(
        "--prompts", type=Path, help="as Spec-Bench has them, JSONL; by default a few of our own"
    )


def source_of(arguments: argparse.Namespace) -> str:
    """Where the prompts are from, for a report."""
    return "our own" if arguments.prompts is None else "of a file"


def read_conversations(path: Path | None, limit: int | None = None) -> list[Conversation]:
    """Prompts in Spec-Bench's format: a line of JSON each, with ``category`` and ``turns``.

    Args:
        path: None for ``EXAMPLES``.
        limit: most of a category; the file's first ones.

    Raises:
        InvalidConfigError: the file can't be read, or has another format.
    """
    counts: Counter[str] = Counter()
    kept: list[Conversation] = []
    for conversation in EXAMPLES if path is None else _conversations_of(path):
        counts[conversation.category] += 1
        if limit is None or counts[conversation.category] <= limit:
            kept.append(conversation)
    return kept


def _conversations_of(path: Path) -> list[Conversation]:
    found: list[Conversation] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            item = json.loads(line)
            turns = tuple(map(str, item["turns"]))
            if turns:
                found.append(Conversation(str(item["category"]), turns))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfigError(
            f"--prompts {path}: {type(error).__name__}: {error}; it must have a line of JSON per "
            f"prompt, with its category and a list of turns"
        ) from None
    if not found:
        raise InvalidConfigError(f"--prompts {path} has no prompts")
    return found


@dataclass
class Tally:
    """What the requests of one engine took and brought."""

    seconds: float = 0.0
    """From request to answer."""
    num_tokens: int = 0
    decode_seconds: float = 0.0
    """From the first token to the last."""
    num_decoded: int = 0
    """Tokens after the first, with which no draft can come."""
    drafts: DraftCounts = field(default_factory=DraftCounts)

    def add(self, output: RequestOutput, seconds: float) -> None:
        """Takes in a request with one choice."""
        metrics, num_tokens = output.metrics, len(output.outputs[0].token_ids)
        self.seconds += seconds
        self.num_tokens += num_tokens
        if metrics.first_token_time is not None and metrics.last_token_time is not None:
            self.decode_seconds += metrics.last_token_time - metrics.first_token_time
            self.num_decoded += num_tokens - 1
        if metrics.drafts is not None:
            add_counts(self.drafts, metrics.drafts)

    def include(self, other: "Tally") -> None:
        """Takes in another's requests."""
        self.seconds += other.seconds
        self.num_tokens += other.num_tokens
        self.decode_seconds += other.decode_seconds
        self.num_decoded += other.num_decoded
        add_counts(self.drafts, other.drafts)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def decoded_per_second(self) -> float | None:
        return self.num_decoded / self.decode_seconds if self.decode_seconds else None


def answer_all(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
) -> Tally:
    """Answers prompts that start together; ``seconds`` is until all are answered."""
    now = llm.engine.events.now
    started = now()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = now() - started
    tally = Tally()
    for output in outputs:
        tally.add(output, 0.0)
    tally.seconds = took
    return tally


def add_counts(total: DraftCounts, more: DraftCounts) -> None:
    """Adds up counts of drafts."""
    total.num_verifications += more.num_verifications
    total.num_reached += more.num_reached
    for mine, other in ((total.proposed, more.proposed), (total.accepted, more.accepted)):
        mine.extend([0] * (len(other) - len(mine)))
        for position, count in enumerate(other):
            mine[position] += count
    total.seconds += more.seconds
    total.plain_seconds += more.plain_seconds


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Another one first each turn: whoever is first may find a busier or cooler machine."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]
