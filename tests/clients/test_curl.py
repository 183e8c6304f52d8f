"""curl, as the documents use it."""

import json
import subprocess

from tests.clients.conftest import MAX_TOKENS, QUESTION, Served


def curl(*arguments: str) -> str:
    done = subprocess.run(
        ["curl", "-sS", "--max-time", "60", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def chat(served: Served, *arguments: str, **fields: object) -> str:
    body = {
        "model": served.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        **fields,
    }
    options = ["-H", "Content-Type: application/json", "-d", json.dumps(body), *arguments]
    return curl(f"{served.base_url}/chat/completions", *options)


def test_an_answer(served: Served) -> None:
    assert json.loads(chat(served))["choices"][0]["message"]["content"] == served.answer


def test_a_stream(served: Served) -> None:
    *events, done, rest = chat(served, "-N", stream=True).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == served.answer


def test_status_and_error_object(served: Served) -> None:
    *lines, status = chat(served, "-w", "\n%{http_code}", model="other").splitlines()
    assert status == "404"
    assert json.loads("".join(lines))["error"]["code"] == "model_not_found"
    assert curl("-o", "/dev/null", "-w", "%{http_code}", f"{served.url}/health") == "200"


def test_without_the_header_that_curl_would_need(served: Served) -> None:
    """``-d`` alone sends a form: the answer says what is missing."""
    answer = curl(f"{served.base_url}/chat/completions", "-d", '{"messages": []}')
    assert "Content-Type: application/json" in json.loads(answer)["error"]["message"]
