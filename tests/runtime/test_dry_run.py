"""The dry run's executor: readable, deterministic, and obedient to the sampling parameters."""

import math
from typing import Any

import pytest

from mini_infer.core.batch import Admission, Chunk, ScheduledBatch
from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import OutOfMemoryError
from mini_infer.core.outputs import StepOutput
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.dry_run import WORDS, DryRunExecutor, dry_run_model_config

PROMPT = tuple(ByteTokenizer().encode("Tell me something."))
EOS = 257


def make_config(**options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "model_config": dry_run_model_config(),
        "served_model_name": "dry-run",
        "load_format": "dummy",
        "dtype": "float16",
        "device": "cpu",
        "attention_backend": "torch",
        "max_model_len": 2048,
        "kv_cache_memory": 2**30,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "depth": 2,
        "distributed_executor_backend": "local",
        "dry_run": True,
    }
    return EngineConfig(**{**defaults, **options})


def make_executor() -> DryRunExecutor:
    executor = DryRunExecutor(make_config())
    executor.start()
    return executor


def admission(
    params: SamplingParams,
    token_ids: tuple[int, ...] = PROMPT,
    slot: int = 0,
    seed: int = 1,
    bad_words: tuple[tuple[int, ...], ...] = (),
    num_prompt_tokens: int | None = None,
) -> Admission:
    stops = (EOS, *params.stop_token_ids)
    return Admission(
        request_id=f"r{slot}",
        slot=slot,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens or len(token_ids),
        params=params,
        seed=seed,
        stop_token_ids=stops,
        bad_words_token_ids=bad_words,
    )


def decode_chunk(position: int, slot: int = 0) -> Chunk:
    """The chunk that feeds the token at ``position - 1`` and samples the one at ``position``."""
    return Chunk(f"r{slot}", slot, position - 1, 1)


def generate(
    executor: DryRunExecutor, admitted: Admission, max_steps: int = 400
) -> list[StepOutput]:
    """Prefill, then decode until the end of the sequence; nothing is read before the end."""
    start = len(admitted.token_ids)
    prefill = ScheduledBatch(0, (Chunk("r", admitted.slot, 0, start),), (admitted,))
    handles = [executor.submit(prefill)]
    for step in range(1, max_steps):
        chunk = decode_chunk(start + step, admitted.slot)
        handles.append(executor.submit(ScheduledBatch(step, (chunk,))))
    outputs = [handle.result() for handle in handles]
    ids = [output.token_ids[0][0] for output in outputs]
    return outputs[: ids.index(EOS) + 1] if EOS in ids else outputs


def ids_of(outputs: list[StepOutput]) -> list[int]:
    return [output.token_ids[0][0] for output in outputs]


def test_says_words_and_then_ends() -> None:
    ids = ids_of(generate(make_executor(), admission(SamplingParams(max_tokens=None))))
    assert ids[-1] == EOS
    words = ByteTokenizer().decode(ids[:-1]).lower().replace(".", "").split()
    assert len(words) >= 8
    assert set(words) <= set(WORDS)


def test_does_not_wait_for_results_to_be_read() -> None:
    executor = make_executor()
    params = SamplingParams(max_tokens=None)
    ahead = ids_of(generate(executor, admission(params), max_steps=12))
    executor = make_executor()
    one_by_one = []
    start = len(PROMPT)
    admitted = (admission(params),)
    for step in range(12):
        chunk = decode_chunk(start + step) if step else Chunk("r0", 0, 0, start)
        handle = executor.submit(ScheduledBatch(step, (chunk,), admitted if not step else ()))
        one_by_one.append(handle.result().token_ids[0][0])
    assert ahead == one_by_one


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_depends_on_prompt_and_seed(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=None)
    executor = make_executor()
    first = ids_of(generate(executor, admission(params, seed=1)))
    assert ids_of(generate(executor, admission(params, seed=1, slot=3))) == first
    other_seed = ids_of(generate(executor, admission(params, seed=2)))
    assert (other_seed == first) == (temperature == 0.0)
    assert ids_of(generate(executor, admission(params, PROMPT[:-1], seed=1))) != first


def test_preempted_request_goes_on_where_it_was() -> None:
    params = SamplingParams(max_tokens=None)
    whole = ids_of(generate(make_executor(), admission(params)))
    known = PROMPT + tuple(whole[:7])
    resumed = admission(params, known, slot=5, num_prompt_tokens=len(PROMPT))
    assert ids_of(generate(make_executor(), resumed)) == whole[7:]


def test_chunked_prompt_samples_only_at_its_end() -> None:
    executor = make_executor()
    params = SamplingParams(max_tokens=None)
    half = len(PROMPT) // 2
    first = executor.submit(
        ScheduledBatch(0, (Chunk("r0", 0, 0, half, samples=False),), (admission(params),))
    )
    last = executor.submit(ScheduledBatch(1, (Chunk("r0", 0, half, len(PROMPT) - half),)))
    assert first.result().token_ids == ((),)
    whole = ids_of(generate(make_executor(), admission(params)))
    assert last.result().token_ids == ((whole[0],),)


def test_neighbours_do_not_matter() -> None:
    params = SamplingParams(max_tokens=None)
    alone = ids_of(generate(make_executor(), admission(params)))
    executor = make_executor()
    size = len(PROMPT)
    both = (admission(params, slot=1, seed=9), admission(params, slot=0))
    batch = ScheduledBatch(0, (Chunk("r1", 1, 0, size), Chunk("r0", 0, 0, size)), both)
    ids = [executor.submit(batch).result().token_ids[1][0]]
    for step in range(1, 6):
        chunks = (decode_chunk(size + step, 1), decode_chunk(size + step, 0))
        ids.append(executor.submit(ScheduledBatch(step, chunks)).result().token_ids[1][0])
    assert ids == alone[:6]


def test_slot_is_reused_by_another_request() -> None:
    executor = make_executor()
    params = SamplingParams(max_tokens=None)
    generate(executor, admission(params, seed=4))
    fresh = ids_of(generate(make_executor(), admission(params, seed=1)))
    assert ids_of(generate(executor, admission(params, seed=1))) == fresh


def test_ignore_eos_never_ends() -> None:
    outputs = generate(make_executor(), admission(SamplingParams(max_tokens=None, ignore_eos=True)))
    assert len(outputs) == 400
    text = ByteTokenizer().decode(ids_of(outputs)[:390])
    assert set(text.lower().replace(".", "").split()[:-1]) <= set(WORDS)


def test_min_tokens_delays_the_end() -> None:
    short = ids_of(generate(make_executor(), admission(SamplingParams(max_tokens=None))))
    wanted = len(short) + 20
    params = SamplingParams(max_tokens=None, min_tokens=wanted)
    ids = ids_of(generate(make_executor(), admission(params)))
    assert ids.index(EOS) == wanted
    assert ids[: len(short) - 1] == short[:-1]


def test_min_tokens_masks_stop_token_ids() -> None:
    space = ord(" ")
    params = SamplingParams(max_tokens=None, min_tokens=30, stop_token_ids=(space,))
    ids = ids_of(generate(make_executor(), admission(params)))
    assert space not in ids[:30]
    assert space in ids[30:]


def test_allowed_token_ids() -> None:
    params = SamplingParams(max_tokens=None, allowed_token_ids=[65, 66])
    ids = ids_of(generate(make_executor(), admission(params), max_steps=30))
    assert set(ids) == {65, 66}


@pytest.mark.parametrize(("bias", "expected"), [(100.0, {90}), (-100.0, set())])
def test_logit_bias_extremes(bias: float, expected: set[int]) -> None:
    token_id = 90 if bias > 0 else ord("e")
    params = SamplingParams(max_tokens=None, ignore_eos=True, logit_bias={token_id: bias})
    ids = ids_of(generate(make_executor(), admission(params), max_steps=60))
    assert {item for item in ids if item == token_id} == expected
    assert (set(ids) == expected) == (bias > 0)


def test_bad_words_are_not_completed() -> None:
    params = SamplingParams(max_tokens=None)
    text = bytes(ids_of(generate(make_executor(), admission(params)))[:-1])
    word = text[5:8]
    banned = admission(params, bad_words=(tuple(word), ()))
    ids = ids_of(generate(make_executor(), banned))
    changed = bytes(item for item in ids if item < 256)
    assert word not in changed
    assert changed[:7] == text[:7]


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_consistent(count: int) -> None:
    params = SamplingParams(max_tokens=None, logprobs=count)
    for output in generate(make_executor(), admission(params), max_steps=10):
        ((entry,),) = output.logprobs
        assert entry.token_id == output.token_ids[0][0]
        assert entry.rank == 1
        assert entry.logprob <= 0
        assert len(entry.top) == count
        values = [logprob for _, logprob in entry.top]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-9
        if count:
            assert entry.top[0] == (entry.token_id, entry.logprob)


def test_logprobs_rank_a_forced_token() -> None:
    params = SamplingParams(max_tokens=None, logprobs=20, allowed_token_ids=[200])
    output = generate(make_executor(), admission(params), max_steps=1)[0]
    entry = output.logprobs[0][0]
    assert entry.token_id == 200
    assert entry.rank > 1
    assert entry.logprob < entry.top[0][1]


def test_no_logprobs_unless_asked() -> None:
    output = generate(make_executor(), admission(SamplingParams(max_tokens=None)), max_steps=1)[0]
    assert output.logprobs == ((),)
    assert output.prompt_logprobs == ((),)


def test_prompt_logprobs_do_not_depend_on_chunks() -> None:
    params = SamplingParams(max_tokens=None, prompt_logprobs=3)
    whole = generate(make_executor(), admission(params), max_steps=2)
    executor = make_executor()
    cut = 5
    first = executor.submit(
        ScheduledBatch(0, (Chunk("r0", 0, 0, cut, samples=False),), (admission(params),))
    )
    second = executor.submit(ScheduledBatch(1, (Chunk("r0", 0, cut, len(PROMPT) - cut),)))
    entries = first.result().prompt_logprobs[0] + second.result().prompt_logprobs[0]
    assert entries == whole[0].prompt_logprobs[0]
    assert [entry.token_id for entry in entries] == list(PROMPT[1:])
    assert whole[1].prompt_logprobs == ((),)
    for entry in entries:
        assert len(entry.top) == 3
        assert (entry.rank <= 3) == (entry.token_id in dict(entry.top))


def test_block_count_comes_from_memory_or_from_the_option() -> None:
    per_block = 2 * 2 * 30 * 3 * 64 * 16
    assert DryRunExecutor(make_config(kv_cache_memory=10 * per_block + 1)).start() == 10
    assert DryRunExecutor(make_config(num_kv_blocks=3)).start() == 3
    with pytest.raises(OutOfMemoryError, match="raise it, or lower block_size"):
        DryRunExecutor(make_config(kv_cache_memory=per_block - 1)).start()


def test_shutdown_twice_is_harmless() -> None:
    executor = make_executor()
    executor.shutdown()
    executor.shutdown()
