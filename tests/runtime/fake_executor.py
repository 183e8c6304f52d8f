"""An executor without a model, whose output depends on every cached token of the context.

Its "KV" of a token is the token itself, stored where the block table says. A next token is a hash
of what the whole context's slots hold, so a wrong block, a stale entry or a reused slot changes the
output or fails an assertion.
"""

import zlib
from collections.abc import Sequence

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.model_config import ModelConfig, RopeConfig
from mini_infer.core.outputs import StepOutput

VOCAB_SIZE = 260
TINY_MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
)


def make_config(**options: object) -> EngineConfig:
    """A concrete configuration for tests; ``options`` override."""
    defaults: dict[str, object] = {
        "model": "tiny",
        "model_config": TINY_MODEL,
        "served_model_name": "tiny",
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "torch",
        "max_model_len": 256,
        "block_size": 4,
        "kv_cache_memory": 2**20,
        "num_kv_blocks": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "depth": 1,
        "distributed_executor_backend": "local",
    }
    return EngineConfig(**(defaults | options))  # type: ignore[arg-type]


def next_token(token_ids: Sequence[int]) -> int:
    """What the fake model says after ``token_ids``."""
    return zlib.crc32(b",".join(b"%d" % token for token in token_ids)) % VOCAB_SIZE


def expected_output(prompt: Sequence[int], max_tokens: int, eos: frozenset[int]) -> list[int]:
    """The oracle: no cache, no batch, one token at a time."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


class LazyResult:
    """A result that asserts it is read in order of submission."""

    def __init__(self, executor: "FakeExecutor", index: int, out: StepOutput) -> None:
        self._executor, self._index, self._out = executor, index, out

    def result(self) -> StepOutput:
        assert self._executor.num_read == self._index
        self._executor.num_read += 1
        return self._out


class FakeExecutor:
    """Keeps the state a device would: token table, block tables, KV slots."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.num_submitted = 0
        self.num_read = 0
        self.max_in_flight = 0
        self.batches: list[ScheduledBatch] = []
        self.fail_at: set[int] = set()
        self.poison: dict[str, int] = {}
        """Requests that make a step raise which computes this many of their tokens or more."""
        self.num_failed = 0
        self._kv: dict[int, int] = {}
        self._tokens: dict[int, list[int]] = {}
        self._blocks: dict[int, list[int]] = {}

    def start(self) -> int:
        assert self.config.num_kv_blocks is not None
        return self.config.num_kv_blocks

    def shutdown(self) -> None:
        self._kv.clear()

    def submit(self, batch: ScheduledBatch) -> LazyResult:
        if batch.step_id in self.fail_at or any(
            chunk.num_computed_tokens + chunk.num_new_tokens
            >= self.poison.get(chunk.request_id, 2**31)
            for chunk in batch.chunks
        ):
            self.num_failed += 1
            raise RuntimeError("the fake model fails as told")
        self.batches.append(batch)
        assert batch.chunks, "an empty step"
        slots = [chunk.slot for chunk in batch.chunks]
        assert len(set(slots)) == len(slots), "a slot is in a step twice"
        for admission in batch.admissions:
            self._tokens[admission.slot] = list(admission.token_ids)
            self._blocks[admission.slot] = list(admission.block_ids)
        results = []
        for chunk in batch.chunks:
            self._blocks[chunk.slot] += chunk.new_block_ids
        for chunk in batch.chunks:
            assert chunk.num_new_tokens > 0, "a query of length zero"
            results.append(self._run(chunk.slot, chunk.num_computed_tokens, chunk.num_new_tokens))
        for chunk, (end, context) in zip(batch.chunks, results, strict=True):
            tokens = self._tokens[chunk.slot]
            assert context == tokens[:end], "the cache does not hold this request's tokens"
            assert chunk.samples == (end == len(tokens))
        out = []
        for chunk, (_, context) in zip(batch.chunks, results, strict=True):
            sampled = (next_token(context),) if chunk.samples else ()
            self._tokens[chunk.slot] += sampled
            out.append(sampled)
        self.num_submitted += 1
        self.max_in_flight = max(self.max_in_flight, self.num_submitted - self.num_read)
        return LazyResult(self, self.num_submitted - 1, StepOutput(tuple(out)))

    def _run(self, slot: int, start: int, count: int) -> tuple[int, list[int]]:
        size = self.config.block_size
        table = self._blocks[slot]
        for position in range(start, start + count):
            self._kv[table[position // size] * size + position % size] = self._tokens[slot][
                position
            ]
        end = start + count
        return end, [self._kv[table[p // size] * size + p % size] for p in range(end)]
