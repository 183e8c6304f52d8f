"""lm-eval's ``local-completions``: it scores with ``echo`` and ``logprobs``, token ids as prompts.

The tokenizer is the server's, which lm-eval finds by itself (/tokenizer_info).
"""

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from tests.clients.conftest import PROMPT, Served

ANSWERS = (" Paris.", " London.", " a very large banana", " Café ☕")


@pytest.fixture
def model(served: Served) -> LocalCompletionsAPI:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return LocalCompletionsAPI(
        model=served.model,
        base_url=f"{served.url}/v1/completions",
        num_concurrent=4,
        max_length=512,
        max_gen_toks=16,
        max_retries=1,
    )


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, item, row) for row, item in enumerate(arguments)]  # type: ignore[arg-type]


def score(served: Served, prompt: str, answer: str) -> float:
    """The log-probability of ``answer``, from vLLM's ``prompt_logprobs``."""
    ids = [
        httpx.post(f"{served.url}/tokenize", json={"prompt": text}).json()["tokens"]
        for text in (prompt, prompt + answer)
    ]
    body = {"prompt": ids[1], "max_tokens": 1, "prompt_logprobs": 0}
    choice = httpx.post(f"{served.base_url}/completions", json=body).json()["choices"][0]
    positions = choice["prompt_logprobs"][len(ids[0]) :]
    return sum(next(iter(position.values()))["logprob"] for position in positions)


def test_log_likelihoods(served: Served, model: LocalCompletionsAPI) -> None:
    assert model.tokenizer_backend == "remote"
    requests = instances("loglikelihood", [(PROMPT, answer) for answer in ANSWERS])
    found = model.loglikelihood(requests, disable_tqdm=True)
    expected = [score(served, PROMPT, answer) for answer in ANSWERS]
    assert [value for value, _ in found] == pytest.approx(expected, rel=1e-3, abs=1e-3)
    if served.is_real:
        assert max(found)[0] == found[0][0], "Paris is the likeliest"
        assert found[0][1] != found[2][1], "and what greedy decoding would write"


def test_rolling_log_likelihoods(served: Served, model: LocalCompletionsAPI) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 3
    (value,) = model.loglikelihood_rolling(
        instances("loglikelihood_rolling", [(text,)]), disable_tqdm=True
    )
    assert value < -10


def test_generation(served: Served, model: LocalCompletionsAPI) -> None:
    options = {"until": ["\n\n", "zzz"], "temperature": 0, "do_sample": False}
    (text,) = model.generate_until(
        instances("generate_until", [(PROMPT, options)]), disable_tqdm=True
    )
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "stop": ["\n\n", "zzz"]}
    plain = httpx.post(f"{served.base_url}/completions", json=body).json()["choices"][0]["text"]
    assert text == plain


@pytest.mark.real_model
def test_a_task_from_end_to_end(served: Served, tmp_path: Path) -> None:
    """A task of multiple choice that the small model gets right, from a file: no data set is
    fetched."""
    if not served.is_real:
        return
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    questions = [
        ("The capital of France is", [" Paris", " banana"], 0),
        ("Two plus two equals", [" potato", " four"], 1),
        ("Water is made of hydrogen and", [" oxygen", " guitar"], 0),
    ]
    lines = [
        json.dumps({"question": question, "choices": choices, "label": label})
        for question, choices, label in questions
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    (tmp_path / "tiny.yaml").write_text(
        f"task: tiny\n"
        f"dataset_path: json\n"
        f"dataset_kwargs:\n"
        f"  data_files:\n"
        f"    test: {tmp_path}/data.jsonl\n"
        f"  cache_dir: {tmp_path}/cache\n"
        f"output_type: multiple_choice\n"
        f"test_split: test\n"
        f'doc_to_text: "{{{{question}}}}"\n'
        f'doc_to_choice: "{{{{choices}}}}"\n'
        f"doc_to_target: label\n"
        f'target_delimiter: ""\n'
        f"metric_list:\n"
        f"  - metric: acc\n"
    )
    result = simple_evaluate(
        model="local-completions",
        model_args={
            "model": served.model,
            "base_url": f"{served.base_url}/completions",
            "max_length": 512,
        },
        tasks=["tiny"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert result["results"]["tiny"]["acc,none"] == 1.0
