"""What is sent: invented words, prompts from a file, conversations, or the lengths of a trace.

Invented prompts are common words, about a token each with most tokenizers. How many tokens a word
has with the model at hand is measured (``tokens_per_word``), so that lengths come out as asked for
without its tokenizer; the figures count what the server says.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_infer.cli.load.client import send
from mini_infer.cli.load.run import Job, Target
from mini_infer.core.errors import InvalidConfigError, MiniInferError
from mini_infer.runtime.dry_run import WORDS

if TYPE_CHECKING:
    import aiohttp

SAMPLE_WORDS = (20, 120)


@dataclass(frozen=True, slots=True)
class Words:
    """Makes texts of about so many tokens."""

    tokens_per_word: float = 1.0

    def text(self, rng: random.Random, num_tokens: int) -> str:
        num_words = max(1, round(num_tokens / self.tokens_per_word))
        return " ".join(rng.choices(WORDS, k=num_words))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt and of its answer; each is uniform within ``spread`` of its share
    around it."""

    prompt: int
    output: int
    spread: float = 0.0

    def draw(self, rng: random.Random) -> tuple[int, int]:
        prompt, output = (
            max(1, rng.randint(round(mean * (1 - self.spread)), round(mean * (1 + self.spread))))
            for mean in (self.prompt, self.output)
        )
        return prompt, output


async def tokens_per_word(session: "aiohttp.ClientSession", target: Target) -> float:
    """Asks the server, with two prompts of known numbers of words. It is the first that is sent.

    Raises:
        MiniInferError: the server does not answer as it should.
    """
    counts = []
    for num_words in SAMPLE_WORDS:
        text = Words().text(random.Random(num_words), num_words)
        record = await send(session, target.url, target.body(Job(text, 1)))
        if record.error:
            raise MiniInferError(f"{target.url} does not serve a first request: {record.error}")
        counts.append(record.num_prompt_tokens)
    difference = counts[1] - counts[0]
    if difference <= 0:  # no usage, which not every server streams
        return 1.0
    return difference / (SAMPLE_WORDS[1] - SAMPLE_WORDS[0])


def random_jobs(words: Words, lengths: Lengths, rng: random.Random) -> Iterator[Job]:
    """Prompts that share nothing."""
    while True:
        num_prompt_tokens, num_output_tokens = lengths.draw(rng)
        yield Job(words.text(rng, num_prompt_tokens), num_output_tokens)


def prefix_jobs(
    words: Words, lengths: Lengths, rng: random.Random, num_prefixes: int, prefix_tokens: int
) -> Iterator[Job]:
    """Each prompt begins with one of ``num_prefixes`` texts, as system prompts do."""
    prefixes = [words.text(rng, prefix_tokens) for _ in range(num_prefixes)]
    for job in random_jobs(words, lengths, rng):
        yield Job(f"{rng.choice(prefixes)} {job.prompt}", job.num_output_tokens)


def prompt_jobs(path: Path, lengths: Lengths, rng: random.Random) -> list[Job]:
    """Prompts of a file in random order: a text per line, or JSON lines with ``prompt`` or
    ``turns``, of which the first counts.

    Raises:
        InvalidConfigError: it can't be read, or holds no prompt.
    """
    prompts = [
        _prompt_of(path, number, line)
        for number, line in enumerate(read_lines(path), start=1)
        if line.strip()
    ]
    rng.shuffle(prompts)
    return [Job(prompt, lengths.draw(rng)[1]) for prompt in not_empty(path, prompts)]


def sharegpt_jobs(path: Path, words: Words, rng: random.Random) -> list[Job]:
    """First questions of ShareGPT's conversations, and answers of the same number of tokens.

    Raises:
        InvalidConfigError: it can't be read, or holds no conversation.
    """
    try:
        conversations = json.loads("\n".join(read_lines(path)))
        jobs = [
            Job(
                turns[0]["value"],
                max(1, round(words.tokens_per_word * len(turns[1]["value"].split()))),
            )
            for item in conversations
            if len(turns := item["conversations"]) > 1 and turns[0]["value"].strip()
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidConfigError(
            f"{path} is no list of ShareGPT's conversations: {type(error).__name__}: {error}"
        ) from None
    rng.shuffle(jobs)
    return not_empty(path, jobs)


def repeated(jobs: Iterable[Job], num: int) -> list[Job]:
    """The first ``num`` jobs, from the beginning again where there are fewer."""
    if not isinstance(jobs, list):
        return list(islice(jobs, num))
    return [jobs[row % len(jobs)] for row in range(num)]


def read_lines(path: Path) -> list[str]:
    """Lines of a text file, which may be compressed (.gz).

    Raises:
        InvalidConfigError: it can't be read.
    """
    try:
        if path.suffix == ".gz":
            import gzip

            with gzip.open(path, "rt", encoding="utf-8") as file:
                return file.read().splitlines()
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidConfigError(f"can't read {path}: {reason}") from None


def not_empty(path: Path, found: "Sequence[Any]") -> "list[Any]":
    """Raises InvalidConfigError: nothing was found in the file."""
    if not found:
        raise InvalidConfigError(f"{path} holds nothing to send")
    return list(found)


def _prompt_of(path: Path, number: int, line: str) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        item = json.loads(line)
        prompt = item["prompt"] if "prompt" in item else item["turns"][0]
    except (ValueError, KeyError, IndexError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise InvalidConfigError(
            f'{path}, line {number}: neither a text nor JSON such as {{"prompt": "..."}}'
        )
    return prompt
