"""The chat page in Chromium, as a person uses it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from tests.clients.conftest import CHROMIUM, QUESTION, Served, started

CHAT = "**/v1/chat/completions"
GATE = """
// Lets one event of an answer through at a time, when the test says so.
const gate = (window.gate = {
  closed: false,
  waiting: [],
  pass: () => gate.waiting.shift()(),
  arrival: async () => {
    while (!gate.waiting.length) await new Promise(requestAnimationFrame);
  },
});
const fetchAtOnce = window.fetch;
window.fetch = async (url, options) => {
  const response = await fetchAtOnce(url, options);
  if (!gate.closed || !response.ok) return response;
  const aborted = new Promise((resolve) => options.signal.addEventListener("abort", resolve));
  const onlyWhenTold = new TransformStream({
    async transform(event, controller) {
      const told = new Promise((resolve) => gate.waiting.push(resolve));
      if (await Promise.race([told, aborted])) controller.error(options.signal.reason);
      else controller.enqueue(new TextEncoder().encode(event));
    },
  });
  let rest = "";
  const events = new TransformStream({
    transform(text, controller) {
      const parts = (rest + text).split("\\n\\n");
      rest = parts.pop();
      for (const part of parts) controller.enqueue(part + "\\n\\n");
    },
  });
  const text = response.body.pipeThrough(new TextDecoderStream());
  return new Response(text.pipeThrough(events).pipeThrough(onlyWhenTold), response);
};
"""


expect.set_options(timeout=30_000)  # a busy machine's; what is there is seen at once


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    """The page, which is to answer greedily; a fault of its script fails the test."""
    faults: list[str] = []
    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.add_init_script(GATE)
        page.goto(served.url)
        page.get_by_label("Temperature").fill("0")
        yield page
    assert faults == []


def send(page: Page, text: str) -> None:
    box = page.get_by_role("textbox", name="Message")
    box.fill(text)
    box.press("Enter")


def chunks(*contents: str) -> str:
    events = [{"choices": [{"delta": {"content": content}}]} for content in contents]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events)


def test_a_conversation(page: Page, served: Served) -> None:
    expect(page.get_by_role("heading")).to_have_text(served.model)
    send(page, QUESTION)
    answers = page.get_by_role("article", name="Assistant")
    expect(answers.locator(".body")).to_have_text(served.answer)
    expect(answers.locator(".figures")).to_contain_text("first token after")
    expect(page.get_by_role("button", name="Send")).to_be_visible()  # the stream's end comes later
    with page.expect_request(CHAT) as request:
        send(page, "And of Spain?")
    sent = request.value.post_data_json["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert sent[1]["content"] == served.answer
    expect(answers).to_have_count(2)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_it_streams_and_stops(page: Page, served: Served) -> None:
    page.evaluate("gate.closed = true")
    send(page, QUESTION)
    body = page.get_by_role("article", name="Assistant").locator(".body")
    seen = ""
    for _ in range(4):
        page.evaluate("gate.arrival()")
        page.evaluate("gate.pass()")
        page.evaluate("gate.arrival()")
        page.evaluate("() => new Promise(requestAnimationFrame)")
        text = body.text_content() or ""
        assert text.startswith(seen)
        seen = text
    assert 0 < len(seen) < len(served.answer)
    assert served.answer.startswith(seen)
    expect(page.get_by_role("button", name="Send")).to_be_hidden()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("article", name="Assistant")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    page.evaluate("gate.closed = false")
    send(page, QUESTION)
    expect(page.get_by_role("article", name="Assistant")).to_have_count(2)


def test_a_refusal_is_shown_and_the_question_kept(page: Page) -> None:
    page.get_by_label("Max tokens").fill("9999999")
    send(page, QUESTION)
    expect(page.locator(".error")).to_contain_text("max_tokens")
    expect(page.get_by_role("textbox", name="Message")).to_have_value(QUESTION)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_server_that_is_gone(page: Page) -> None:
    page.route(CHAT, lambda route: route.abort())
    send(page, QUESTION)
    expect(page.locator(".error")).to_contain_text("can't be reached")


def test_a_failure_in_the_middle_keeps_what_came(page: Page) -> None:
    broken = chunks("Half an ans") + 'data: {"error": {"message": "the model failed"}}\n\n'

    def answer(route: Route) -> None:
        route.fulfill(body=broken + "data: [DONE]\n\n", content_type="text/event-stream")

    page.route(CHAT, answer)
    send(page, QUESTION)
    article = page.get_by_role("article", name="Assistant")
    expect(article.locator(".body")).to_have_text("Half an ans")
    expect(article.locator(".error")).to_have_text("the model failed")


def test_a_models_text_is_never_html(page: Page) -> None:
    text = "<img src=x onerror=alert(1)> and `x < y`\n```python\nprint('<b>')\n```\nend"

    def answer(route: Route) -> None:
        body = chunks(text[:30], text[30:]) + "data: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.route(CHAT, answer)
    send(page, "<b>Hi</b>")
    body = page.get_by_role("article", name="Assistant").locator(".body")
    expect(body.locator("pre code")).to_have_text("print('<b>')")
    expect(body.locator("code").first).to_have_text("x < y")
    expect(body).to_contain_text("<img src=x onerror=alert(1)>")
    assert page.locator("img, b").count() == 0


def test_reload_and_new_chat_begin_anew(page: Page) -> None:
    articles = page.get_by_role("article")
    for begin_anew in (page.reload, page.get_by_role("button", name="New chat").click):
        page.get_by_label("Max tokens").fill("16")
        send(page, QUESTION)
        expect(articles).to_have_count(2)
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        begin_anew()
        expect(articles).to_have_count(0)
        expect(page.get_by_text("Ask something.")).to_be_visible()
    with page.expect_request(CHAT) as request:
        send(page, QUESTION)
    assert len(request.value.post_data_json["messages"]) == 1


def test_a_server_with_keys_asks_for_one(browser: Browser) -> None:
    with started("--dry-run", "--api-key", "secret") as url, browser.new_context() as context:
        page = context.new_page()
        page.goto(url)
        page.get_by_label("API key").fill("wrong")
        send(page, QUESTION)
        expect(page.locator(".error")).to_contain_text("API key")
        page.get_by_label("API key").fill("secret")
        send(page, QUESTION)
        figures: Any = page.locator(".figures").last
        expect(figures).to_contain_text("tokens")
