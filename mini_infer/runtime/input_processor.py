"""From what a caller sends to requests that the scheduler can run, or a typed error."""

import operator
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidRequestError, PromptTooLongError
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import MAX_TOKENS_PER_BAD_WORD, SamplingParams
from mini_infer.runtime.grammar_compiler import GrammarCompiler
from mini_infer.runtime.grammar_trials import GrammarTrials
from mini_infer.runtime.tokenizer import Tokenizer
from mini_infer.runtime.unicode_text import utf8_bytes

SEED_BITS = 63
"""A seed fits a signed 64-bit integer on every device."""
TRUNCATION_MARGIN = 64
"""Tokens that are read before those that ``truncate_prompt_tokens`` keeps."""


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """A caller's request, tokenised and validated, and the engine's requests: one per choice."""

    request_id: str
    prompt: str | None
    """None when the caller sent token ids."""
    prompt_token_ids: list[int]
    params: SamplingParams
    requests: list[Request] = field(default_factory=list)
    stream: bool = True
    """Does the caller read deltas as they come? Else each choice has one, at its end."""


class InputProcessor:
    """Tokenises and validates requests against one engine's limits.

    A config whose ``num_kv_blocks`` is still None leaves the KV pool out of the checks.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """``grammars`` are those of the engine, where that is in this process; otherwise forms are
        tried in processes, which ``close`` ends."""
        self._grammars = grammars or GrammarTrials(config, tokenizer)
        self._max_model_len = config.max_model_len
        blocks = config.num_kv_blocks
        self._pool = None if blocks is None else blocks * config.block_size
        self._tokenizer = tokenizer
        self._vocab_size = config.model_config.vocab_size
        eos_token_ids = set(config.model_config.eos_token_ids)
        if tokenizer.eos_token_id is not None:
            eos_token_ids.add(tokenizer.eos_token_id)
        self._eos_token_ids = frozenset(eos_token_ids)
        # One generator per engine: the same requests in the same order give the same run.
        self._seeds = random.Random(config.seed)

    def process(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        stream: bool = True,
    ) -> ProcessedRequest:
        """``params.n`` requests for one prompt: ``request_id`` itself, or ``request_id#i``.

        ``add_special_tokens`` is False for a rendered chat template, which holds its own. Without
        ``stream`` no delta comes before a choice ends, which spares their making.

        Raises:
            InvalidRequestError: empty prompt, a token id outside the vocabulary, a priority or
                salt of the wrong kind, or a form of output that is invalid or not supported.
            PromptTooLongError: prompt, or prompt and ``max_tokens``, exceed the context or the
                KV pool.
        """
        _check_queueing(priority, cache_salt)
        num_kept = self._num_kept(params)
        if isinstance(prompt, str):
            if num_kept is None:
                self._check_length(prompt)
                encoded = prompt
            else:
                encoded = self._tail(prompt, num_kept)
            prompt_token_ids = self._tokenizer.encode(encoded, add_special_tokens)
        else:
            prompt_token_ids = _integers(prompt)
        if num_kept is not None:
            prompt_token_ids = prompt_token_ids[-num_kept:]
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt is empty: send at least one token", "prompt")
        self._check_vocabulary("prompt", prompt_token_ids)
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("logit_bias", params.logit_bias)
        self._check_allowed(params.allowed_token_ids or ())
        max_tokens = self._max_tokens(len(prompt_token_ids), params)
        bad_words = self._bad_words(params.bad_words)
        if params.structured_outputs is not None:
            self._grammars.check(params.structured_outputs)
        seed = self._seeds.getrandbits(SEED_BITS) if params.seed is None else params.seed
        requests = [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                prompt_token_ids=prompt_token_ids,
                params=params,
                seed=(seed + index) % 2**SEED_BITS,
                max_tokens=max_tokens,
                eos_token_ids=self._eos_token_ids,
                bad_words_token_ids=bad_words,
                priority=priority,
                cache_salt=cache_salt,
                told_at_end=not stream and _only_tokens(params),
            )
            for index in range(params.n)
        ]
        text = prompt if isinstance(prompt, str) else None
        return ProcessedRequest(request_id, text, prompt_token_ids, params, requests, stream)

    async def compile_grammar(self, params: SamplingParams) -> None:
        """What ``process`` would wait for, without keeping an event loop from its other work."""
        if params.structured_outputs is not None:
            await self._grammars.compiled(params.structured_outputs)

    def close(self) -> None:
        """Ends the processes that try forms of output."""
        if isinstance(self._grammars, GrammarTrials):
            self._grammars.close()

    def _num_kept(self, params: SamplingParams) -> int | None:
        """How many of a prompt's last tokens are used; None for all."""
        if params.truncate_prompt_tokens != -1:
            return params.truncate_prompt_tokens
        room = self._max_model_len
        if self._pool is not None:
            room = min(room, self._pool + 1)
        asked = max(params.min_tokens, 1) if params.max_tokens is None else params.max_tokens
        return max(room - asked, 1)

    def _tail(self, text: str, num_tokens: int) -> str:
        """The end of a text, of at least ``num_tokens`` tokens where it has as many: what is cut
        from a text of megabytes need not be read. How the text is split into tokens at the cut
        does not reach the tokens that are kept, which begin ``TRUNCATION_MARGIN`` later."""
        kept = min(num_tokens, self._max_model_len) + TRUNCATION_MARGIN
        return text[-kept * self._tokenizer.max_chars_per_token :]

    def _check_length(self, text: str) -> None:
        """Refuses a text of megabytes before minutes are spent on its tokens."""
        num_chars = self._max_model_len * self._tokenizer.max_chars_per_token
        if len(text) > num_chars:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, more than max_model_len "
                f"({self._max_model_len} tokens) can hold ({num_chars} characters): shorten it",
                "prompt",
            )

    def _check_token_ids(self, param: str, token_ids: Iterable[int]) -> None:
        token_ids = list(token_ids)
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidRequestError(
                    f"{param}: a token id is an integer, not {token_id!r}", param
                )
        self._check_vocabulary(param, token_ids)

    def _check_vocabulary(self, param: str, token_ids: Sequence[int]) -> None:
        """By built-in functions: prompts bring thousands of ids, and the first step waits."""
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            return
        stranger = next(item for item in token_ids if not 0 <= item < self._vocab_size)
        raise InvalidRequestError(
            f"{param}: token id {stranger} is outside the model's vocabulary: ids go from "
            f"0 to {self._vocab_size - 1}",
            param,
        )

    def _check_allowed(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) > self._vocab_size:
            raise InvalidRequestError(
                f"allowed_token_ids has {len(token_ids)} entries, more than the vocabulary's "
                f"{self._vocab_size} tokens: name each token once",
                "allowed_token_ids",
            )
        self._check_token_ids("allowed_token_ids", token_ids)

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Output tokens allowed: as asked, else what is left of the context and the pool."""
        room = self._max_model_len - num_prompt_tokens
        limit = f"max_model_len ({self._max_model_len} tokens)"
        # The last token of an output is never an input, so it needs no KV.
        if self._pool is not None and self._pool - num_prompt_tokens + 1 < room:
            room = self._pool - num_prompt_tokens + 1
            limit = f"the KV cache ({self._pool} tokens; raise kv_cache_memory or num_kv_blocks)"
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens and leaves no room for an output in "
                f"{limit}: shorten it by at least {1 - room} tokens",
                "prompt",
            )
        name = "max_tokens" if params.max_tokens is not None else "min_tokens"
        asked = params.min_tokens if params.max_tokens is None else params.max_tokens
        if asked > room:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens and {name} is {asked}: together "
                f"{num_prompt_tokens + asked}, more than {limit}. Shorten the prompt or lower "
                f"{name} to at most {room}",
                name,
            )
        return room if params.max_tokens is None else params.max_tokens

    def _bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is spelled at the start of a text and after a space."""
        sequences: dict[tuple[int, ...], None] = {}
        num_chars = MAX_TOKENS_PER_BAD_WORD * self._tokenizer.max_chars_per_token
        for word in words:
            for spelling in (word.lstrip() or word, f" {word.lstrip()}"):
                if len(spelling) > num_chars:  # surely too many tokens: don't spend time on them
                    raise _bad_word_too_long(word, f"{len(spelling)} characters")
                token_ids = self._tokenizer.encode(spelling, add_special_tokens=False)
                if len(token_ids) > MAX_TOKENS_PER_BAD_WORD:
                    raise _bad_word_too_long(word, f"{len(token_ids)} tokens")
                if token_ids:
                    self._check_token_ids("bad_words", token_ids)
                    sequences[tuple(token_ids)] = None
        return tuple(sequences)


def _only_tokens(params: SamplingParams) -> bool:
    """Is nothing to be looked for in the text, or kept beside the tokens, while they come?"""
    return not params.stop and params.logprobs is None and params.prompt_logprobs is None


def _bad_word_too_long(word: str, length: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"bad_words: {word!r:.40} has {length} with a space before it or without, and a word may "
        f"have at most {MAX_TOKENS_PER_BAD_WORD} tokens: ban a shorter part of it",
        "bad_words",
    )


def _check_queueing(priority: object, cache_salt: object) -> None:
    """Refuses here, for this caller, what would raise in the scheduler, which serves everybody."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError(f"priority must be an integer, got {priority!r}", "priority")
    if not isinstance(cache_salt, str):
        raise InvalidRequestError(f"cache_salt must be a string, got {cache_salt!r}", "cache_salt")
    utf8_bytes(cache_salt, "cache_salt", "cache_salt")


def _integers(token_ids: Sequence[int]) -> list[int]:
    """Plain ints, also from an array of NumPy's or torch's integers; True is none."""
    try:
        kinds = list(map(type, token_ids))
        if kinds.count(int) == len(kinds):  # in half of the time that a set of them takes
            return list(token_ids)
        if bool not in kinds:
            return list(map(operator.index, token_ids))
    except TypeError:
        pass
    raise InvalidRequestError(
        f"the prompt must be text or a list of token ids, got {token_ids!r:.80}", "prompt"
    )
