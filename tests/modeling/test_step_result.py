"""What a step's tensors become: one entry a row, with as many alternatives as the row asked for."""

from pathlib import Path

import pytest
import torch

from mini_infer.core.batch import Admission, Chunk, ScheduledBatch
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.modeling.load import load_model
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.modeling.model_runner import ModelRunner
from mini_infer.modeling.step_result import ROWS_AT_ONCE, LocalStep, read_logprobs
from mini_infer.modeling.token_logprobs import token_logprobs
from tests.modeling.driver import PagedDriver
from tests.runtime.engine_tools import run
from tests.runtime.fake_executor import make_config
from tests.runtime.tiny_model import tiny_engine

NO_FILES = ModelFiles(Path("unused"), Path("unused"))
MIXED = [3, None, 0, 5, 1]


def test_each_row_gets_as_many_alternatives_as_it_asked_for() -> None:
    logits = torch.randn(len(MIXED), 40, generator=torch.Generator().manual_seed(3))
    token_ids = torch.arange(len(MIXED))
    entries = read_logprobs(token_ids, token_logprobs(logits, token_ids, 5), MIXED)
    assert [entry and len(entry.top) for entry in entries] == MIXED
    for entry, row in zip(entries, logits.log_softmax(-1), strict=True):
        if entry is not None:
            best = row.topk(len(entry.top))
            assert [token_id for token_id, _ in entry.top] == best.indices.tolist()


def test_a_mixed_batch_reports_to_each_request_what_it_asked_for() -> None:
    runner = ModelRunner(make_config(), NO_FILES)
    runner.load()
    runner.init_cache(2 * len(MIXED))
    slots = range(len(MIXED))
    batch = ScheduledBatch(
        step_id=0,
        chunks=tuple(Chunk(str(slot), slot, 0, 3, new_block_ids=(slot,)) for slot in slots),
        admissions=tuple(
            Admission(str(slot), slot, (1, 2, 3), 3, SamplingParams(logprobs=MIXED[slot]), seed=0)
            for slot in slots
        ),
    )
    out = runner.execute(batch).result()
    found = [len(entries[0].top) if entries else None for entries in out.logprobs]
    assert found == MIXED


@pytest.mark.parametrize("chunk_size", [50, ROWS_AT_ONCE, ROWS_AT_ONCE + 2, 300, 512])
def test_log_probabilities_of_a_prompt_longer_than_what_is_held_at_a_time(chunk_size: int) -> None:
    prompt = torch.randint(0, 200, (300,), generator=torch.Generator().manual_seed(5)).tolist()
    engine = tiny_engine(
        max_model_len=512, max_num_batched_tokens=chunk_size, enable_prefix_caching=False
    )
    engine.add_request("r", prompt, SamplingParams(max_tokens=1, prompt_logprobs=3))
    first, *entries = run(engine)["r"].prompt_logprobs or []
    assert first is None  # nothing predicts the first token

    model = load_model(engine.config, NO_FILES)
    expected = PagedDriver(model).prefill("r", prompt, 300).log_softmax(-1)
    assert len(entries) == len(prompt) - 1
    for token_id, entry, row in zip(prompt[1:], entries, expected[:-1], strict=True):
        best = row.topk(3).indices.tolist()
        assert entry is not None
        assert list(entry) == list(dict.fromkeys([token_id, *best]))
        for shown, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[shown].item(), abs=1e-4)
            assert logprob.rank == 1 + int((row > row[shown]).sum())


def test_a_step_that_samples_nothing_is_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies to the host, of a prompt's log-probabilities, are not over before the step is."""
    calls: list[str] = []

    class Event:
        def synchronize(self) -> None:
            calls.append("wait")

    class Stream:
        def record_event(self) -> Event:
            calls.append("record")
            return Event()

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    batch = ScheduledBatch(0, (Chunk("r", 0, 0, 3, samples=False),))
    LocalStep(batch, {}, None, [], torch.device("cpu")).result()
    assert not calls
    step = LocalStep(batch, {}, None, [], torch.device("cuda"))
    assert calls == ["record"]
    assert step.result().token_ids == ((),)
    assert calls == ["record", "wait"]
