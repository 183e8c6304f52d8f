"""The benchmarks of speculative decoding, on tiny models: what they count, and that they run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import same_answers
import speculation
import speculative
import speculative_batches
import speculative_forced
import torch
from harness import Report
from speculation import Tally, read_conversations

from mini_infer import LLM, SamplingParams
from mini_infer.core.errors import InvalidConfigError
from mini_infer.kernels import ops

TEMPLATE = "{% for message in messages %}{{ message.content }};{% endfor %}"
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(script: Any, *options: object) -> dict[str, Any]:
        output = tmp_path / "result.json"
        shared = ["--threads", 1, "--device", "cpu", "--quick", "--output", output]
        script.main([str(option) for option in [*shared, *options]])
        result: dict[str, Any] = json.loads(output.read_text())
        assert result["benchmark"] == script.__name__
        return result

    return run


@pytest.fixture
def prompts(model_folder: Path, tmp_path: Path) -> Path:
    (model_folder / "chat_template.jinja").write_text(TEMPLATE)
    path = tmp_path / "prompts.jsonl"
    rows = [("code", ["ababab", "again"]), ("code", ["x"]), ("prose", ["abcabc"])]
    path.write_text(
        "\n".join(
            json.dumps({"question_id": number, "category": category, "turns": turns})
            for number, (category, turns) in enumerate(rows)
        )
    )
    return path


def test_kinds_of_prompts(run: Run, model_folder: Path, prompts: Path) -> None:
    options = ["--model", model_folder, "--prompts", prompts, "--max-model-len", 256]
    options += ["--dtype", "float32", "--methods", "ngram", "early_exit", "--exit-layers", 1]
    options += ["--reopen", "--temperatures", 0, 0.6, "--engine", "seed=1"]
    result = run(speculative, *options)
    names = [row["prompts"] for row in result["rows"]]
    kinds = ["code", "prose"]
    assert names == [f"{kind}, temperature {value}" for value in ("0", "0.6") for kind in kinds] + [
        "all"
    ]
    bars = {bar["name"]: bar["value"] for bar in result["bars"]}
    for method in ("ngram", "early_exit"):
        assert bars[f"{method}: answers identical to plain %"] == 100
        assert all(row[f"{method}: speed-up"] > 0 for row in result["rows"])
    assert result["setup"]["lengths"]["prompts"] == "2, of a file"  # one of each kind


def test_where_rows_round_differently_identical_answers_have_no_bar(
    run: Run, model_folder: Path, prompts: Path
) -> None:
    options = ["--model", model_folder, "--prompts", prompts, "--max-model-len", 256]
    result = run(speculative, *options, "--dtype", "bfloat16")
    assert not any("identical" in bar["name"] for bar in result["bars"])
    assert any(note.startswith("ngram: answers identical") for note in result["notes"])


def test_a_first_difference_is_a_near_tie_where_both_tokens_are_as_likely(
    model_folder: Path,
) -> None:
    sameness = same_answers.Sameness()
    with LLM(str(model_folder), dtype="float32", device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, ignore_eos=True)
        [output] = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        first, second = logprobs[0]
        gap = logprobs[0][first].logprob - logprobs[0][second].logprob
        unlikely = next(token for token in range(3, 99) if token not in logprobs[0])
        for other in ([first], [second, 9], [unlikely, 9], [first, 8]):
            sameness.add([1, 2, 3], [first], other, greedy=True)
        sameness.add([1, 2, 3], [first], [second], greedy=False)
        sameness.look(llm)
    assert (sameness.num_answers, sameness.num_same) == (5, 1)
    assert sameness.num_looked_at == 3
    assert sameness.num_near_ties >= (gap <= same_answers.NEAR_TIE)
    report = Report("speculative", "", {})
    sameness.report("ngram", report, has_bar=False)
    assert not report.bars
    assert "identical to plain: 20.0 %" in report.notes[0]
    sameness.report("ngram", report, has_bar=True)
    assert report.bars[0].value == 20


def test_batches_and_their_plot(
    run: Run, model_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    plot = tmp_path / "curve.svg"
    options = ["--model", model_folder, "--prompts", prompts, "--plot", plot]
    options += ["--reopen", "--processor-time", "--repeats", 2]
    result = run(speculative_batches, *options)
    assert [row["batch"] for row in result["rows"]] == [1, 2]
    for row in result["rows"]:
        assert row["ngram, adaptive: speed-up"] > 0
        assert row["ngram, fixed: of all"] > 0
    assert "ngram, adaptive" in plot.read_text()


def test_time_of_many_threads_is_no_measure(model_folder: Path) -> None:
    options = ["--model", str(model_folder), "--processor-time", "--threads", "2"]
    with pytest.raises(InvalidConfigError, match="--threads 1"):
        speculative_batches.main(options)


def test_batches_of_random_tokens(run: Run, model_folder: Path) -> None:
    options = ["--model", model_folder, "--batches", 1, "--random-tokens"]
    result = run(speculative_batches, *options)
    assert result["setup"]["lengths"]["prompts"] == "random tokens"


def test_forced_acceptance(run: Run, tiny_config: Path) -> None:
    before = ops.accept_drafts_
    options = ["--model", tiny_config, "--draft-model", tiny_config, "--output-tokens", 60]
    result = run(speculative_forced, *options, "--acceptance", 0.8, "--drafts", 3)
    assert ops.accept_drafts_ is before
    fixed, adaptive = result["rows"]
    assert (fixed["drafts"], adaptive["drafts"]) == ("3", "adaptive")
    assert fixed["length"] == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3, abs=0.7)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_or_none_is_accepted(tiny_config: Path, share: float) -> None:
    speculation = {"method": "early_exit", "num_speculative_tokens": 2, "adaptive": False}
    with (
        speculative_forced.accepting(share),
        LLM(str(tiny_config), load_format="dummy", speculative_config=speculation) as llm,
    ):
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        outputs = llm.generate([[1, 2, 3], [4]], params, use_tqdm=False)
    for output in outputs:
        drafts = output.metrics.drafts
        assert drafts is not None
        assert drafts.acceptance_rate == share
        assert drafts.num_draft_tokens > 10


def test_coins_are_fair_and_belong_to_their_places() -> None:
    slots, places = torch.meshgrid(torch.arange(20), torch.arange(5000), indexing="ij")
    coins = speculative_forced.coin(slots.flatten(), places.flatten())
    assert 0 <= coins.min() < coins.max() < 1
    for bound in (0.1, 0.5585, 0.9):
        assert (coins < bound).double().mean().item() == pytest.approx(bound, abs=0.01)
    pairs = (coins < 0.5).view(20, 5000)
    both = (pairs[:, 1:] & pairs[:, :-1]).double().mean().item()
    assert both == pytest.approx(0.25, abs=0.01)
    assert torch.equal(speculative_forced.coin(slots[3], places[3]), coins.view(20, -1)[3])


def test_a_prediction_counts_steps_without_drafts() -> None:
    tally = Tally(num_decoded=10)
    tally.drafts.add(3, 2, seconds=2.0, plain_seconds=3.0)
    # Three tokens in two seconds, and seven plain ones of a second each.
    assert speculative_forced.predicted_speedup(tally) == pytest.approx(10 / 9)
    assert speculative_forced.predicted_speedup(Tally(num_decoded=10)) is None


def test_counts_add_up() -> None:
    one, two = Tally(), Tally()
    one.drafts.add(1, 1)
    two.drafts.add(3, 2, 1.0, 2.0)
    speculation.add_counts(one.drafts, two.drafts)
    assert (one.drafts.proposed, one.drafts.accepted) == ([2, 1, 1], [2, 1, 0])
    assert one.drafts.speedup == 2.0


def test_prompts_of_our_own() -> None:
    kinds = [item.category for item in read_conversations(None, limit=1)]
    assert len(set(kinds)) == len(kinds) == 4
    assert len(read_conversations(None)) == 8


def test_order_of_turns() -> None:
    assert [speculation.rotated("abc", turn) for turn in range(4)] == [
        list(order) for order in ("abc", "bca", "cab", "abc")
    ]


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"category": "a"}', '{"category": 1, "turns": 2}']
)
def test_a_file_of_another_format(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidConfigError, match="--prompts"):
        read_conversations(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="No such file"):
        read_conversations(tmp_path / "none")
