"""``mini-infer serve`` as a user starts it, on the real model, asked over HTTP."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

pytestmark = [pytest.mark.real_model, pytest.mark.processes]

ROOT = Path(__file__).parents[1]
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def url(real_model_folder: Path) -> Iterator[str]:
    program = "import sys; from mini_infer.cli.main import main; sys.exit(main())"
    command = ["serve", "--model", str(real_model_folder), "--served-model-name", MODEL]
    with subprocess.Popen(
        [sys.executable, "-c", program, *command, "--port", "0", "--max-model-len", "1024"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            assert process.wait(30) == 0


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(url: str, **fields: Any) -> httpx.Response:
    body = {"messages": FRANCE, "temperature": 0, "max_tokens": 24, **fields}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response


def events(response: httpx.Response) -> list[dict[str, Any]]:
    *lines, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(response: httpx.Response) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events(response))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory maps")
def test_torch_is_in_the_engines_process_only(url: str) -> None:
    port = int(url.rpartition(":")[2])
    [server] = [
        child  # of those that other tests may have left running
        for child in psutil.Process().children()
        if any(socket.laddr.port == port for socket in child.net_connections("tcp"))
    ]

    def has_torch(process: psutil.Process) -> bool:
        return any("libtorch" in library.path for library in process.memory_maps())

    assert not has_torch(server)
    assert any(has_torch(child) for child in server.children())


def test_an_answer_by_plain_http(url: str) -> None:
    answer = chat(url).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["model"] == MODEL
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_the_joined_stream_is_the_answer(url: str) -> None:
    whole = chat(url).json()["choices"][0]["message"]["content"]
    response = chat(url, stream=True)
    assert joined(response) == whole
    assert len(events(response)) > 5, "it came in one piece"
    assert events(response)[-1]["choices"][0]["finish_reason"] == "stop"


def test_the_openai_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=24
    )
    content = answer.choices[0].message.content
    assert content is not None
    assert "Paris" in content
    stream = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=24, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == content


def test_several_turns(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "What is my name?"},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=24
    )
    assert "Ada" in (answer.choices[0].message.content or "")


def test_regression_01_through_the_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt="Here is the English alphabet: ABC",
        temperature=0,
        max_tokens=32,
        stop="DEFGHIJ",
        stream=True,
    )
    choices = [chunk.choices[0] for chunk in stream]
    assert not set("DEFGHIJ") & set("".join(choice.text for choice in choices))
    assert choices[-1].finish_reason == "stop"


def test_answers_are_the_same_in_company(url: str) -> None:
    """Eight streams at once, one of which is refused; the others do not notice."""
    alone = joined(chat(url, stream=True))
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(chat, url, stream=True) for _ in range(7)]
        refused = pool.submit(
            httpx.post, f"{url}/v1/completions", json={"prompt": "x " * 3000}, timeout=60
        )
        assert refused.result().status_code == 400
        assert "1024" in refused.result().json()["error"]["message"]
        assert [joined(answer.result()) for answer in answers] == [alone] * 7
