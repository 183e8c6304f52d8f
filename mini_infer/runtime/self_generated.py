"""Texts that a model writes itself, for training what drafts for it.

A draft is right if it is what the target says, so the target's own words are the data (DistillSpec,
arXiv 2310.08461). Without prompts it makes those up as well: given the beginning of its chat
template up to where the user speaks, an instruct model writes the user's turn (Magpie, 2406.08464),
and then answers it. Left to itself it asks for little of what it is asked in use, so half of the
turns are begun for it.
"""

import json
import random
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mini_infer.core.errors import InvalidRequestError, UnsupportedModelError
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.modeling.training.texts import Text
from mini_infer.runtime.llm import LLM
from mini_infer.runtime.tokenizer import Tokenizer

Conversation = list[dict[str, Any]]
Prompts = Callable[[int], list[list[int]]]
"""At most so many prompts, as token ids."""
MARKER = "mini-infer puts the user's words here"
TEMPERATURES = (0.0, 0.0, 0.0, 0.3, 0.6, 1.0)
"""Of answers, drawn with equal chances: half are greedy, as the texts are that drafts suit best."""
ROUND_REQUESTS_PER_SEQ = 4
"""Requests that the engine is given together, for each that it runs at once: so few of its steps
are spent on the last ones of a round."""
OPENINGS = (
    "Translate this German sentence into English:",
    "Translate into English: La",
    "How would you say the following in French?",
    "Summarize the following article in a few sentences.\n\n",
    "Here is a news story. What are its main points?\n\n",
    "Read the passage and answer the question at its end.\n\nPassage:",
    "Using only the documents below, answer the question.\n\nDocument 1:",
    "Extract all names and dates from this text:",
    "Turn the following notes into a table:",
    "Who was",
    "When did",
    "Where is",
    "What is the name of the",
    "How many",
    "What is the difference between",
    "Explain how",
    "Why do",
    "Solve this step by step:",
    "A shop sells",
    "If a train",
    "Find the value of x if",
    "Is the following statement true? Give your reasons.",
    "Write a Python function that",
    "Find the bug in this code:\n\n```python\n",
    "Write an SQL query that",
    "Explain what this program does:\n\n",
    "Imagine you are",
    "Pretend to be a",
    "Write a short story about",
    "Write a poem about",
    "Write an email to",
    "Rewrite this paragraph in plain words:",
    "Give me a list of",
    "Compare",
    "Plan a",
    "What are the pros and cons of",
)
"""How users begin: a few words of each kind of task. What it is about is the model's own."""
OPENED_SHARE = 0.5
OPENING_TOKENS = 32
"""Of a text by a model that does not chat: they are drawn freely, and what follows goes on at each
of the temperatures."""
USUAL_ANSWER = 64
"""Most answers are longer, so a last round seldom brings much more than was asked for."""
SILENT_ROUNDS = 16
"""So many in a row without a word are no chance any more. A last round is of one prompt, which a
model that chats may end before it begins: that once ended the training."""


def read_conversations(path: Path) -> list[Conversation]:
    """Prompts from a JSON Lines file: each line has ``messages``, or ``turns`` (what a user says,
    one after another; only the first is asked) or ``prompt``.

    Raises:
        InvalidRequestError: the file can't be read, or a line has none of them; says which.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} can't be read: {error}", "prompts") from None
    conversations = [
        _conversation(line, f"line {number} of {path}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not conversations:
        raise InvalidRequestError(f"{path} has no prompts: each line is a JSON object", "prompts")
    return conversations


def write_texts(
    llm: LLM, num_tokens: int, conversations: Sequence[Conversation] = (), seed: int = 0
) -> list[Text]:
    """Texts with at least ``num_tokens`` tokens of the model's own, up to the engine's
    ``max_model_len`` each.

    Conversations are answered in turn, and again at other temperatures where there are too few.

    Raises:
        InvalidRequestError: no prompt is short enough, or a template refuses one.
        UnsupportedModelError: there are no prompts, and the model can't make some up.
    """
    chance = random.Random(seed)
    most = ROUND_REQUESTS_PER_SEQ * llm.engine.config.max_num_seqs
    prompts = _given_prompts(llm, conversations) if conversations else _own_prompts(llm, chance)
    texts: list[Text] = []
    with tqdm(total=num_tokens, desc="Texts", unit="token", disable=None, leave=False) as bar:
        written = 0
        while written < num_tokens:
            count = min(most, 1 + (num_tokens - written) // USUAL_ANSWER)
            some = prompts(count)
            params = [_params(chance, chance.choice(TEMPERATURES)) for _ in some]
            for output in llm.generate(some, params, use_tqdm=False):
                prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
                texts.append(Text([*prompt, *answer], len(prompt)))
                written += len(answer)
            bar.update(min(written, num_tokens) - bar.n)
    return texts


def _params(chance: random.Random, temperature: float, **more: Any) -> SamplingParams:
    more = {"max_tokens": None} | more
    return SamplingParams(temperature=temperature, seed=chance.randrange(2**31), **more)


def _longest_prompt(llm: LLM) -> int:
    """The other half of a text is an answer's."""
    return llm.engine.config.max_model_len // 2


def _given_prompts(llm: LLM, conversations: Sequence[Conversation]) -> Prompts:
    limit = _longest_prompt(llm)
    prompts = [_prompt(llm.engine.tokenizer, conversation) for conversation in conversations]
    fitting = [prompt for prompt in prompts if 0 < len(prompt) <= limit]
    if not fitting:
        raise InvalidRequestError(
            f"all prompts are longer than {limit} tokens, half of max_length: raise it", "prompts"
        )
    endless = cycle(fitting)
    return lambda count: list(islice(endless, count))


def _own_prompts(llm: LLM, chance: random.Random) -> Prompts:
    """Prompts that the model makes up: what a user says, or where it can't chat, how a text
    begins."""
    tokenizer = llm.engine.tokenizer
    beginning, end = _user_turn(tokenizer)

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    before, behind = encoded(beginning), encoded(end)
    room = _longest_prompt(llm) - len(before) - len(behind)
    opened = [encoded(beginning + opening) for opening in OPENINGS]
    opened = [turn for turn in opened if len(turn) - len(before) <= room // 2]
    if not beginning:
        before, room, opened = _first_token(llm), min(room - 1, OPENING_TOKENS), []
    if room < 1:
        raise InvalidRequestError(
            f"what surrounds a prompt takes {len(before) + len(behind)} tokens: raise max_length",
            "max_length",
        )

    def said_by_users(count: int) -> list[list[int]]:
        begun = [
            chance.choice(opened) if opened and chance.random() < OPENED_SHARE else before
            for _ in range(count)
        ]
        params = [
            _params(
                chance,
                1.0,
                max_tokens=room - (len(start) - len(before)),
                stop_token_ids=behind[:1],
            )
            for start in begun
        ]
        made_up = []
        for output in llm.generate(begun, params, use_tqdm=False):
            (turn,) = output.outputs
            said = turn.token_ids[:-1] if turn.finish_reason == "stop" else turn.token_ids
            if said:
                made_up.append([*output.prompt_token_ids, *said, *behind])
        return made_up

    def prompts(count: int) -> list[list[int]]:
        for _ in range(SILENT_ROUNDS):
            if made_up := said_by_users(count):
                return made_up
        raise UnsupportedModelError("the model says nothing where a prompt should be: give prompts")

    return prompts


def _user_turn(tokenizer: Tokenizer) -> tuple[str, str]:
    """What stands in the chat template before a user's words, and behind them; "" twice where a
    template is not there or does not show them as they are."""
    if not tokenizer.chat_template_source(False):
        return "", ""
    message = {"role": "user", "content": MARKER}
    rendered = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    before, _, after = rendered.partition(MARKER)
    return (before, after) if after else ("", "")


def _first_token(llm: LLM) -> list[int]:
    """What a base model begins a text with."""
    config, tokenizer = llm.engine.config.model_config, llm.engine.tokenizer
    for token in (config.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [token]
    raise UnsupportedModelError("the model has no token that begins a text: give prompts")


def _prompt(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """Token ids of a conversation; of the bare words of one message where there is no template."""
    if not tokenizer.chat_template_source(False):
        return tokenizer.encode(str(conversation[-1].get("content", "")))
    text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def _conversation(line: str, where: str) -> Conversation:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is not valid JSON: {error}", "prompts") from None
    record = record if isinstance(record, dict) else {}
    messages, turns, prompt = (record.get(name) for name in ("messages", "turns", "prompt"))
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return messages
    text = turns[0] if isinstance(turns, list) and turns else prompt
    if not isinstance(text, str) or not text.strip():
        raise InvalidRequestError(
            f"{where} has neither messages, nor turns, nor a prompt to answer", "prompts"
        )
    return [{"role": "user", "content": text}]
