"""An executor that invents tokens: the real server, scheduler and cache without a model.

It keeps the state that a device would keep (a token table with a row per slot, filled by admissions
and by its own samples), so a step may be submitted before the last one's result was read. What it
says depends on prompt, seed and position alone: not on the batch, chunking or preemption.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from mini_infer.core.batch import Admission, Chunk, ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import OutOfMemoryError
from mini_infer.core.model_config import ModelConfig, RopeConfig
from mini_infer.core.outputs import StepOutput, TokenLogprobs
from mini_infer.runtime.byte_tokenizer import ByteTokenizer

# One word is not ASCII, so that characters split over tokens occur in dry runs too.
VOCABULARY = """
a answer any block café cache chunk each eight every fast few first five four free full half hash
head here hit last light line long many model new next night no old one open or page paged paper
part plain prefix prompt queue quick quiet read short six slot small some step table ten that the
then this three token two very wait warm word write
"""
WORDS = VOCABULARY.split()
SENTENCE_WORDS = (4, 9)
ANSWER_SENTENCES = (2, 5)
LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyz ")
SCRIPTED_LOGIT = 10.0
"""Logits are noise in [-4, 0], 4 lower for what is no letter; the script's token is this above."""

Logits = list[float]


def dry_run_model_config() -> ModelConfig:
    """A small Llama's shape with the byte tokenizer's vocabulary."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=ByteTokenizer.vocab_size,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_word_embeddings=True,
        bos_token_id=ByteTokenizer.bos_token_id,
        eos_token_ids=(257,),
        dtype="float16",
    )


def digest(*parts: object) -> int:
    """A 64-bit hash that is the same in every process, unlike ``hash``."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def script_sentence(key: int, index: int) -> bytes:
    """Sentence ``index`` of the endless text that ``key`` stands for, with a space in front of all
    but the first."""
    random = Random(digest(key, index))
    words = random.choices(WORDS, k=random.randint(*SENTENCE_WORDS))
    sentence = " ".join(words).capitalize() + "."
    return (sentence if index == 0 else " " + sentence).encode()


@dataclass(slots=True)
class Script:
    """What one request will say: bytes of an endless text, and where its answer would end."""

    key: int
    text: bytearray = field(default_factory=bytearray)
    num_sentences: int = 0
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self._extend(Random(self.key).randint(*ANSWER_SENTENCES))
        self.end = len(self.text)

    def byte(self, index: int) -> int:
        while index >= len(self.text):
            self._extend(1)
        return self.text[index]

    def _extend(self, sentences: int) -> None:
        for _ in range(sentences):
            self.text += script_sentence(self.key, self.num_sentences)
            self.num_sentences += 1


@dataclass(slots=True)
class SlotState:
    """A row of the token table, and what the sampler knows of the request in it."""

    admission: Admission
    token_ids: list[int]
    script: Script
    prompt_key: int

    @classmethod
    def admit(cls, admission: Admission) -> "SlotState":
        prompt = admission.token_ids[: admission.num_prompt_tokens]
        prompt_key = digest(prompt)
        seed = 0 if admission.params.greedy else admission.seed
        return cls(
            admission, list(admission.token_ids), Script(digest(prompt_key, seed)), prompt_key
        )

    def output_index(self, position: int) -> int:
        return position - self.admission.num_prompt_tokens

    def masks_stop(self, position: int) -> bool:
        return self.output_index(position) < self.admission.params.min_tokens

    def forbidden(self, position: int) -> set[int]:
        """Tokens that may not stand at ``position``: too early to stop, or they end a bad word."""
        banned = set(self.admission.stop_token_ids) if self.masks_stop(position) else set()
        for word in self.admission.bad_words_token_ids:
            if not word:
                continue
            start = position - len(word) + 1
            if start >= 0 and tuple(self.token_ids[start:position]) == word[:-1]:
                banned.add(word[-1])
        return banned


class MaskedDryStep:
    """A step handle of a batch with masked chunks: it samples once their masks are known."""

    def __init__(self, executor: "DryRunExecutor", batch: ScheduledBatch) -> None:
        self._executor, self._batch = executor, batch
        self._output: StepOutput | None = None

    def sample(self, masks: bytearray) -> None:
        """``masks`` has a row of bits for each masked chunk, and one for each of its drafts."""
        by_chunk = self._batch.mask_rows
        row_bytes = len(masks) // sum(map(len, by_chunk.values()))
        rows = {
            index: [masks[row * row_bytes : (row + 1) * row_bytes] for row in chunk_rows]
            for index, chunk_rows in by_chunk.items()
        }
        self._output = self._executor.run(self._batch, rows)

    def result(self) -> StepOutput:
        assert self._output is not None, "its masks come first"
        return self._output


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step handle whose result is known already."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class DryRunExecutor:
    """Implements ``Executor`` without weights. Tokens are ``ByteTokenizer``'s.

    Raises:
        OutOfMemoryError: ``start``, when the configured KV memory holds not one block.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._vocab_size = config.model_config.vocab_size
        eos = config.model_config.eos_token_ids
        self._eos_token_id = eos[0] if eos else None
        self._slots: dict[int, SlotState] = {}

    def start(self) -> int:
        """The number of blocks that a model of this shape would have in 16-bit floats."""
        config, model = self._config, self._config.model_config
        if config.num_kv_blocks is not None:
            return config.num_kv_blocks
        block_bytes = 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim
        block_bytes *= config.block_size
        assert config.kv_cache_memory is not None, "only a GPU fills what is there"
        if config.kv_cache_memory < block_bytes:
            raise OutOfMemoryError(
                f"kv_cache_memory of {config.kv_cache_memory} bytes holds no KV block "
                f"of {block_bytes} bytes: raise it, or lower block_size"
            )
        return config.kv_cache_memory // block_bytes

    def step_costs(self) -> None:
        """Nothing is computed, so nothing is known of what drafts would cost."""

    def submit(self, batch: ScheduledBatch) -> FinishedStep | MaskedDryStep:
        for admission in batch.admissions:
            self._slots[admission.slot] = SlotState.admit(admission)
        if batch.masked:
            return MaskedDryStep(self, batch)
        return FinishedStep(self.run(batch, {}))

    def run(self, batch: ScheduledBatch, masks: Mapping[int, Sequence[bytearray]]) -> StepOutput:
        """The output of a step; ``masks``, by chunk, tell which tokens a grammar allows at each of
        its places."""
        samples = [
            self._sample_chunk(chunk, masks.get(index, ()))
            for index, chunk in enumerate(batch.chunks)
        ]
        return StepOutput(
            token_ids=tuple(token_ids for token_ids, _ in samples),
            logprobs=tuple(logprobs for _, logprobs in samples),
            prompt_logprobs=tuple(self._prompt_logprobs(chunk) for chunk in batch.chunks),
        )

    def shutdown(self) -> None:
        self._slots.clear()

    def _sample_chunk(
        self, chunk: Chunk, masks: Sequence[bytearray]
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """Tokens, and log-probabilities if asked for: as many as drafts are right, and one."""
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        if not chunk.samples:
            return (), ()
        slot = self._slots[chunk.slot]
        first = chunk.num_computed_tokens + chunk.num_new_tokens - chunk.num_drafts
        if not chunk.start_known:  # steps run as they are submitted, so it is known here
            first = len(slot.token_ids)
        for index in range(chunk.num_drafts + 1):
            token_id, entries = self._sample(slot, first + index, masks[index] if masks else None)
            token_ids.append(token_id)
            logprobs += entries
            if chunk.draft_token_ids[index : index + 1] != (token_id,):
                break
        return tuple(token_ids), tuple(logprobs)

    def _sample(
        self, slot: SlotState, position: int, mask: bytearray | None
    ) -> tuple[int, tuple[TokenLogprobs, ...]]:
        params = slot.admission.params
        scripted = self._scripted(slot, position)
        banned = slot.forbidden(position)
        token_id = scripted
        logprobs: tuple[TokenLogprobs, ...] = ()
        constrained = mask or scripted in banned or params.logit_bias or params.allowed_token_ids
        if constrained or params.logprobs is not None:
            logits = self._logits(slot.script.key, position, scripted)
            if mask is not None:
                logits = [
                    value if mask[token_id >> 3] >> (token_id & 7) & 1 else -math.inf
                    for token_id, value in enumerate(logits)
                ]
            token_id = self._likeliest(logits, slot, banned)
            if params.logprobs is not None:
                logprobs = (token_logprobs(logits, token_id, params.logprobs),)
        slot.token_ids[position:] = [token_id]
        return token_id, logprobs

    def _scripted(self, slot: SlotState, position: int) -> int:
        """The script's token: a byte of the text, or the end of the sequence once it may end."""
        index = slot.output_index(position)
        ends = index >= slot.script.end and not slot.masks_stop(position)
        if ends and self._eos_token_id is not None and not slot.admission.params.ignore_eos:
            return self._eos_token_id
        return slot.script.byte(index)

    def _logits(self, key: int, position: int, scripted: int | None) -> Logits:
        random = Random(digest(key, position)).random
        logits = [
            -4.0 * random() - (0.0 if token_id in LETTERS else 4.0)
            for token_id in range(self._vocab_size)
        ]
        if scripted is not None:
            logits[scripted] += SCRIPTED_LOGIT
        return logits

    def _likeliest(self, logits: Logits, slot: SlotState, banned: set[int]) -> int:
        params = slot.admission.params
        allowed: Iterable[int] = range(self._vocab_size)
        if params.allowed_token_ids is not None:
            allowed = params.allowed_token_ids
        # Where the masks leave nothing, the request's own list wins, as it does in the sampler.
        candidates = [token_id for token_id in allowed if token_id not in banned] or list(allowed)
        bias = params.logit_bias
        return max(candidates, key=lambda token_id: logits[token_id] + bias.get(token_id, 0.0))

    def _prompt_logprobs(self, chunk: Chunk) -> tuple[TokenLogprobs, ...]:
        slot = self._slots[chunk.slot]
        count = slot.admission.params.prompt_logprobs
        if count is None:
            return ()
        first = chunk.num_computed_tokens + 1
        end = min(first + chunk.num_new_tokens, slot.admission.num_prompt_tokens)
        return tuple(
            token_logprobs(
                self._logits(slot.prompt_key, position, None), slot.token_ids[position], count
            )
            for position in range(first, end)
        )


def token_logprobs(logits: Sequence[float], token_id: int, count: int) -> TokenLogprobs:
    """The log-softmax of ``logits [vocabulary]`` at ``token_id`` and at the ``count`` likeliest."""
    normaliser = math.log(math.fsum(map(math.exp, logits)))
    order = sorted(range(len(logits)), key=lambda candidate: -logits[candidate])
    return TokenLogprobs(
        token_id=token_id,
        logprob=min(0.0, logits[token_id] - normaliser),
        rank=1 + sum(value > logits[token_id] for value in logits),
        top=tuple(
            (candidate, min(0.0, logits[candidate] - normaliser)) for candidate in order[:count]
        ),
    )
