"""Texts for training, written by a model that invents tokens."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mini_infer import LLM
from mini_infer.core.errors import InvalidRequestError, UnsupportedModelError
from mini_infer.core.outputs import RequestOutput
from mini_infer.runtime import self_generated
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.self_generated import write_texts

MAX_LENGTH = 160
BEGINNING, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(dry_run=True, max_model_len=MAX_LENGTH, max_num_seqs=4) as llm:
        yield llm


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_model_asks_itself(llm: LLM) -> None:
    texts = write_texts(llm, 300)
    tokenizer = llm.engine.tokenizer
    assert sum(text.num_own_tokens for text in texts) >= 300
    for text in texts:
        prompt = text.token_ids[: text.num_prompt_tokens]
        before, behind = tokenizer.encode(BEGINNING), tokenizer.encode(END)
        assert prompt[: len(before)] == before
        assert prompt[-len(behind) :] == behind
        assert len(before) + len(behind) < len(prompt) <= MAX_LENGTH // 2
        assert len(prompt) < len(text.token_ids) <= MAX_LENGTH


def test_half_of_what_it_asks_is_begun_for_it(llm: LLM) -> None:
    texts = write_texts(llm, 4000)
    tokenizer, begun = llm.engine.tokenizer, 0
    for text in texts:
        said = tokenizer.decode(text.token_ids[: text.num_prompt_tokens], False)
        begun += said.removeprefix(BEGINNING).startswith(self_generated.OPENINGS)
    assert 0.25 < begun / len(texts) < 0.75


def test_the_same_seed_writes_the_same(llm: LLM) -> None:
    assert write_texts(llm, 100, seed=3) == write_texts(llm, 100, seed=3)


@pytest.mark.parametrize("num_silent", [2, self_generated.SILENT_ROUNDS])
def test_a_round_without_a_word_is_asked_for_again(
    num_silent: int, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one is of one prompt, and what a model says is drawn."""
    rounds, generate = iter(range(num_silent)), llm.generate

    def says_nothing_at_first(*args: Any, **options: Any) -> list[RequestOutput]:
        outputs = generate(*args, **options)
        if next(rounds, None) is not None:
            for output in outputs:
                output.outputs[0].token_ids = []
        return outputs

    monkeypatch.setattr(llm, "generate", says_nothing_at_first)
    if num_silent < self_generated.SILENT_ROUNDS:
        assert write_texts(llm, 100)
        return
    with pytest.raises(UnsupportedModelError, match="says nothing"):
        write_texts(llm, 100)


def test_prompts_are_used_in_turn_and_again(llm: LLM) -> None:
    texts = write_texts(llm, 900, [user("one"), user("x" * MAX_LENGTH), user("two")])
    tokenizer = llm.engine.tokenizer
    asked = [tokenizer.decode(text.token_ids[: text.num_prompt_tokens], False) for text in texts]
    assert len(asked) > 2
    for index, prompt in enumerate(asked):
        assert prompt == f"{BEGINNING}{('one', 'two')[index % 2]}{END}"


def test_no_prompt_fits(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="half of max_length"):
        write_texts(llm, 10, [user("x" * MAX_LENGTH)])


def test_the_template_alone_is_too_long() -> None:
    with (
        LLM(dry_run=True, max_model_len=32, max_num_seqs=2) as llm,
        pytest.raises(InvalidRequestError, match="what surrounds a prompt"),
    ):
        write_texts(llm, 10)


def test_a_base_model_goes_on_from_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "chat_template_source", lambda self, with_tools: "")
    texts = write_texts(llm, 200)
    bos = ByteTokenizer.bos_token_id
    assert {text.token_ids[0] for text in texts} == {bos}
    assert {text.num_prompt_tokens for text in texts} == {1 + self_generated.OPENING_TOKENS}
    given = write_texts(llm, 10, [user("words")])
    assert bytes(given[0].token_ids[:5]) == b"words"


@pytest.mark.parametrize(("bos", "eos", "first"), [(7, 8, [7]), (None, 8, [8]), (None, None, None)])
def test_what_begins_a_text(bos: int | None, eos: int | None, first: list[int] | None) -> None:
    model_config, tokenizer = SimpleNamespace(bos_token_id=bos), SimpleNamespace(eos_token_id=eos)
    engine = SimpleNamespace(config=SimpleNamespace(model_config=model_config), tokenizer=tokenizer)
    llm: Any = SimpleNamespace(engine=engine)
    if first is not None:
        assert self_generated._first_token(llm) == first
        return
    with pytest.raises(UnsupportedModelError, match="give prompts"):
        self_generated._first_token(llm)


def test_a_template_that_hides_the_users_words() -> None:
    class Tokenizer(ByteTokenizer):
        def apply_chat_template(self, *_: object, **__: object) -> str:
            return "no words"

    assert self_generated._user_turn(Tokenizer()) == ("", "")
