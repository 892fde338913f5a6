"""The page at `GET /` in a real browser, against a real cluster."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    WebDriverException,
)
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.support.clients.browser import console_messages, emulate, running_browser
from tests.support.clients.page import WAIT_S, Page
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, ctl, request

LONG_QUESTION = "Count from 1 to 500."  # the longest answer of the embedded model
MAX_ROUNDS = 8  # on a busy machine all pieces of an answer may come at once
MIN_CONTRAST = 4.5  # WCAG 2.2, success criterion 1.4.3, level AA
# Records the length of the newest answer at each change.
WATCH_GROWTH = """
window.lengths = [];
new MutationObserver(() => {
  const text = [...document.querySelectorAll('.answer .text')].at(-1);
  if (text) window.lengths.push(text.textContent.length);
}).observe(document.getElementById('turns'), {subtree: true, childList: true, characterData: true});
"""
# Replaces the server inside the page: answers every chat with `pieces`, and records the requests.
FAKE_SERVER = """
const [pieces, status, headers] = arguments;
window.requests = [];
window.fetch = async (path, options = {}) => {
  window.requests.push({path, headers: options.headers ?? {}, body: options.body ?? null});
  if (path !== '/v1/chat/completions') return new Response('{}');
  return new Response(pieces.join(''), {status, headers});
};
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with running_browser() as browser:
        yield browser


@pytest.fixture
def page(cluster: Cluster, browser: webdriver.Chrome) -> Page:
    page = Page(browser, f"http://{cluster.http_address}/")
    page.open()
    return page


def answer_of_the_api(cluster: Cluster, *messages: tuple[str, str], **options: object) -> dict[str, Any]:
    """Body of a chat completion that is not streamed."""
    body = {"messages": [{"role": role, "content": content} for role, content in messages], **options}
    call = urllib.request.Request(
        f"http://{cluster.http_address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(call, timeout=REQUEST_TIMEOUT_S) as response:
        return json.load(response)


def test_an_answer_is_streamed_and_equals_that_of_the_api(cluster: Cluster, page: Page) -> None:
    question = "What is the capital of France?"
    expected = answer_of_the_api(cluster, ("user", question), temperature=0)
    page.fill("temperature", "0")
    page.fill("repetition_penalty", "1")
    for _ in range(MAX_ROUNDS):
        page.find("#new-chat").click()
        page.run(WATCH_GROWTH)
        start = time.monotonic()
        page.send(question)
        page.wait_answered()
        elapsed_s = time.monotonic() - start
        assert page.text_of(".question") == question
        assert page.text_of(".answer .text") == expected["choices"][0]["message"]["content"]
        lengths = set(page.run("return window.lengths"))
        if len(lengths) >= 3:
            break
    assert len(lengths) >= 3, "the text did not grow piece by piece"
    num_tokens = expected["usage"]["completion_tokens"]
    assert page.text_of(".tokens dd") == str(num_tokens)
    ttft, unit = page.text_of(".ttft dd").split()
    ttft_s = float(ttft) / {"s": 1, "ms": 1000}[unit]
    assert 0 < ttft_s < elapsed_s
    tokens_per_second = float(page.text_of(".speed dd").replace(",", ""))
    assert tokens_per_second >= (num_tokens - 1) / elapsed_s - 0.5
    assert page.text_of(".finish dd") == ""
    assert console_messages(page.browser) == []


def test_a_conversation_has_its_history_and_system_prompt(cluster: Cluster, page: Page) -> None:
    system, questions = "Answer in Chinese.", ("What is the capital of France?", "In Japanese, please.")
    page.fill("temperature", "0")
    page.fill("repetition_penalty", "1")
    page.fill("system", system)
    messages = [("system", system)]
    for question in questions:
        page.send(question)
        page.wait_answered()
        messages.append(("user", question))
        expected = answer_of_the_api(cluster, *messages, temperature=0)["choices"][0]["message"]["content"]
        assert page.text_of(".answer .text") == expected
        messages.append(("assistant", expected))
    page.find("#new-chat").click()
    assert page.browser.find_elements(By.CSS_SELECTOR, ".turn") == []
    page.send(questions[1])
    page.wait_answered()
    expected = answer_of_the_api(cluster, messages[0], ("user", questions[1]), temperature=0)
    assert page.text_of(".answer .text") == expected["choices"][0]["message"]["content"]


def test_sampling_options_reach_the_server(cluster: Cluster, page: Page) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.95, "seed": 11, "max_tokens": 12, "top_k": 40}
    for name, value in options.items():
        page.fill(name, str(value))
    page.send("Hello!")
    page.wait_answered()
    expected = answer_of_the_api(cluster, ("user", "Hello!"), **options)
    assert page.text_of(".answer .text") == expected["choices"][0]["message"]["content"]
    is_cut = expected["choices"][0]["finish_reason"] == "length"
    assert ("limit" in page.text_of(".finish dd")) == is_cut
    page.fill("stop-strings", "world")
    page.fill("temperature", "0")
    page.fill("repetition_penalty", "1")
    page.fill("max_tokens", "40")
    page.find(".again").click()
    page.wait_answered()
    assert page.text_of(".answer .text") == "Hello! Ask me about the "


def stop(page: Page, way: str) -> None:
    """Stops the answer, unless it has ended: then the button is hidden."""
    if way == "Escape":
        page.find("#prompt").send_keys(Keys.ESCAPE)
    else:
        with contextlib.suppress(ElementNotInteractableException, ElementClickInterceptedException):
            page.find("#stop").click()


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stop_ends_the_request(cluster: Cluster, page: Page, way: str) -> None:
    page.fill("temperature", "0")
    page.fill("repetition_penalty", "1")
    for _ in range(MAX_ROUNDS):  # a busy machine may let the answer end before
        page.find("#new-chat").click()
        page.send(LONG_QUESTION)
        page.wait(lambda: page.text_of(".answer .text"), "no text came")
        stop(page, way)
        page.wait_answered()
        cluster.wait_idle()
        if page.text_of(".finish dd") == "stopped":
            break
    assert page.text_of(".finish dd") == "stopped"
    text = page.text_of(".answer .text")
    assert text and "500" not in text
    assert int(page.text_of(".tokens dd").removeprefix("≈ ").replace(",", "")) > 0
    page.fill("max_tokens", "40")  # the model may not end an answer that follows half an answer
    page.send("Hello!")
    page.wait_answered()
    history = (("user", LONG_QUESTION), ("assistant", text), ("user", "Hello!"))
    whole = answer_of_the_api(cluster, *history, temperature=0, max_tokens=40)
    assert page.text_of(".answer .text") == whole["choices"][0]["message"]["content"]


def test_leaving_the_page_ends_the_request(cluster: Cluster, page: Page) -> None:
    page.send(LONG_QUESTION)
    page.wait(lambda: page.text_of(".answer .text"), "no text came")
    page.browser.get("about:blank")
    cluster.wait_idle()


def test_the_live_view_shows_running_requests_and_the_kv_cache(cluster: Cluster, page: Page) -> None:
    page.wait(lambda: page.find("#state").text == "ready", "the server is ready, the page does not say so")
    page.wait(lambda: (page.find("#num-running").text, page.find("#kv-usage").text) == ("0", "0 %"), "not idle")
    assert page.find("#model").text == "tiny-llama"
    is_seen = threading.Event()

    def keep_busy() -> None:
        while not is_seen.is_set():
            for _ in cluster.gateway.GenerateStream(request("Hello", 1500, ignore_eos=True), timeout=WAIT_S):
                if is_seen.is_set():
                    break

    streams = [threading.Thread(target=keep_busy) for _ in range(3)]
    for stream in streams:
        stream.start()
    try:
        page.wait(lambda: page.find("#num-running").text == "3", "three requests run, the page does not show them")
        page.wait(lambda: float(page.find("#kv-meter").get_attribute("value")) > 0, "their blocks are not shown")
        page.wait(lambda: page.find("#queue").text == "3, 0", "nor beside the chat")
        page.wait(lambda: page.find("#step-rate").text not in ("–", "0.0"), "steps run, the page does not show them")
        assert int(page.find("#cache-tokens").text.split()[0].replace(",", "")) > 0
    finally:
        is_seen.set()
        for stream in streams:
            stream.join()


def test_the_services_and_their_restarts_are_those_of_the_launcher(cluster: Cluster, page: Page) -> None:
    names = {"attn_worker": "attention worker", "dense_worker": "dense worker", "gateway": "gateway"}
    status = re.findall(r"^(\w+) process \d+, (\d+) restarts", ctl(cluster, "status").stdout, re.MULTILINE)
    assert len(status) == 3
    expected = {names[role]: num_restarts for role, num_restarts in status}
    read = "return [...document.querySelectorAll('#services tbody tr')].map((row) => row.innerText.split('\\t'))"
    page.wait(lambda: {row[0]: row[1] for row in page.run(read)} == expected, f"not shown: {expected}")


def test_markup_of_a_model_or_a_user_stays_text(page: Page) -> None:
    markup = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script><b>x</b>&amp;"
    chunk = {"choices": [{"index": 0, "delta": {"content": markup}, "finish_reason": "stop"}]}
    page.run(FAKE_SERVER, [f"data: {json.dumps(chunk)}\n\n", "data: [DONE]\n\n"], 200, {})
    page.send(markup)
    page.wait_answered()
    assert page.text_of(".answer .text") == markup
    assert page.text_of(".question") == markup
    assert page.run("return document.querySelectorAll('#turns img, #turns script, #turns b').length") == 0
    assert page.browser.title == "Twostroke"


def test_no_script_can_write_markup(page: Page) -> None:
    with pytest.raises(WebDriverException, match="TrustedHTML"):
        page.run("document.getElementById('turns').innerHTML = '<b>x</b>'")


def test_events_may_be_split_anywhere(page: Page) -> None:
    events = "".join(
        f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': piece}}]}, ensure_ascii=False)}\r\n\r\n"
        for piece in ("巴黎", " is", " 🥐.")
    )
    page.run(
        """
        const bytes = new TextEncoder().encode(arguments[0]);
        window.fetch = async (path) => path !== '/v1/chat/completions' ? new Response('{}') : new Response(
          new ReadableStream({start(c) { for (const byte of bytes) c.enqueue(Uint8Array.of(byte)); c.close(); }}));
        """,
        ": comment\n\n" + events + 'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n',
    )
    page.send("Hello!")
    page.wait_answered()
    assert page.text_of(".answer .text") == "巴黎 is 🥐."


def test_an_api_key_is_sent_and_kept_for_the_tab(page: Page) -> None:
    page.fill("api-key", "secret-1")
    page.browser.refresh()
    assert page.find("#api-key").get_property("value") == "secret-1"
    page.run(FAKE_SERVER, ['{"error": {"message": "no valid API key"}}'], 401, {"content-type": "application/json"})
    page.send("Hello!")
    page.wait_answered()
    (call,) = page.run("return window.requests.filter(({path}) => path === '/v1/chat/completions')")
    assert call["headers"]["Authorization"] == "Bearer secret-1"
    assert page.text_of(".problem") == "No valid API key. Enter one under Options."
    assert page.run("return document.activeElement.id") == "api-key"
    assert page.run("return localStorage.length") == 0
    assert "secret-1" not in page.browser.current_url


def test_a_refused_request_says_why_and_can_be_tried_again(cluster: Cluster, page: Page) -> None:
    page.fill("repetition_penalty", "1234")
    page.fill("max_tokens", "5")
    page.send("Hello!")
    page.wait_answered()
    assert "epetition_penalty is 1234" in page.text_of(".problem")
    assert page.last(".problem").is_displayed()
    page.fill("temperature", "0")
    page.fill("repetition_penalty", "1")
    page.find(".again").click()
    page.wait_answered()
    assert not page.last(".problem").is_displayed()
    assert page.text_of(".tokens dd") == "5"


def test_a_full_queue_says_when_to_try_again(page: Page) -> None:
    body = json.dumps({"error": {"message": "4 requests wait, at most 4 may"}})
    page.run(FAKE_SERVER, [body], 429, {"retry-after": "7", "content-type": "application/json"})
    page.send("Hello!")
    page.wait_answered()
    assert page.text_of(".problem") == "4 requests wait, at most 4 may. Try again in 7 s."


def test_an_error_in_the_middle_keeps_the_text_so_far(page: Page) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "So far"}}]}
    error = {"error": {"message": "the dense worker came back with other weights"}}
    page.run(FAKE_SERVER, [f"data: {json.dumps(event)}\n\n" for event in (chunk, error)], 200, {})
    page.send("Hello!")
    page.wait_answered()
    assert page.text_of(".answer .text") == "So far"
    assert page.text_of(".problem") == "The dense worker came back with other weights."


def test_a_field_out_of_range_is_named_before_anything_is_sent(page: Page) -> None:
    page.fill("top_p", "7")
    page.send("Hello!")
    page.wait_answered()
    assert page.text_of(".problem").startswith("Top p:")
    assert page.run("return document.activeElement.id") == "top_p"


def test_a_server_that_is_gone_is_reported(page: Page) -> None:
    page.run("window.fetch = async () => { throw new TypeError('Failed to fetch'); }")
    page.send("Hello!")
    page.wait_answered()
    assert "cannot be reached" in page.text_of(".problem")
    page.wait(lambda: page.find("#state").text == "no answer", "the live view does not show it")


def test_enter_sends_and_shift_enter_does_not(page: Page) -> None:
    prompt = page.find("#prompt")
    prompt.send_keys("one" + Keys.SHIFT + Keys.ENTER + Keys.NULL + "two")
    assert prompt.get_property("value") == "one\ntwo"
    assert page.browser.find_elements(By.CSS_SELECTOR, ".turn") == []
    page.fill("max_tokens", "2")
    prompt.send_keys(Keys.ENTER)
    page.wait_answered()
    assert page.text_of(".question") == "one\ntwo"
    assert prompt.get_property("value") == ""


def test_the_page_asks_no_other_host(page: Page) -> None:
    page.wait(lambda: page.find("#state").text == "ready", "the page does not see its server")
    page.browser.refresh()
    page.wait(lambda: page.find("#state").text == "ready", "the page does not see its server after a reload")
    names = page.run("return performance.getEntries().map(({name}) => name).filter((name) => name.includes('://'))")
    assert names, "nothing was recorded"
    assert [name for name in names if not name.startswith(page.url)] == []
    with pytest.raises(WebDriverException, match="fetch"):
        page.run("return fetch('http://localhost:9/')")  # another origin: refused by the policy
    assert any("Content Security Policy" in message for message in console_messages(page.browser))


def test_every_control_has_a_name(page: Page) -> None:
    page.fill("max_tokens", "2")
    page.fill("top_k", "5")  # opens the folded options
    page.send("Hello!")
    page.wait_answered()
    controls = page.browser.find_elements(By.CSS_SELECTOR, "button, input, textarea, meter")
    shown = [control for control in controls if control.is_displayed()]
    assert len(shown) > 15
    assert [control.get_attribute("outerHTML") for control in shown if not control.accessible_name] == []


@pytest.mark.parametrize("width", [320, 375, 768, 1280])
def test_nothing_is_cut_off_at_any_width(page: Page, width: int) -> None:
    emulate(page.browser, width=width, height=640)
    page.run(FAKE_SERVER, [f'data: {{"choices":[{{"delta":{{"content":"{"x" * 3000}"}}}}]}}\n\n'], 200, {})
    page.send("y" * 300)
    page.wait_answered()
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    assert page.run("const s = document.getElementById('scroll'); return s.scrollWidth <= s.clientWidth")
    selectors = ("#send", "#prompt", "#toggle-options", "#new-chat", "#kv-usage")
    for state in ("connecting", "ready", "not ready", "no answer"):
        boxes = dict(zip(selectors, page.boxes(state, *selectors), strict=True))
        for left, top, right, bottom in boxes.values():
            assert 0 <= left < right <= width and 0 <= top < bottom <= 640, (state, boxes)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(page: Page, scheme: str) -> None:
    emulate(page.browser, width=1200, prefers_color_scheme=scheme)
    pairs = [
        *((text, ground) for text in ("--ink", "--soft") for ground in ("--paper", "--surface", "--sunken")),
        ("--ink", "--mine"),
        ("--on-dense", "--dense"),
        ("--bad", "--bad-surface"),
    ]
    names = sorted({name for pair in pairs for name in pair})
    colors = dict(
        zip(
            names,
            page.run(
                "const style = getComputedStyle(document.documentElement);"
                "return arguments[0].map((name) => style.getPropertyValue(name).trim())",
                names,
            ),
            strict=True,
        )
    )
    light_ground = _luminance(colors["--paper"]) > 0.5
    assert light_ground == (scheme == "light")
    low = [(pair, ratio) for pair in pairs if (ratio := _contrast(*(colors[name] for name in pair))) < MIN_CONTRAST]
    assert low == []


def _contrast(one: str, other: str) -> float:
    """WCAG 2.2's contrast ratio of two colors, #rrggbb."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: str) -> float:
    """WCAG 2.2's relative luminance."""
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_nothing_moves_for_users_who_prefer_reduced_motion(page: Page) -> None:
    emulate(page.browser, width=1200, prefers_reduced_motion="reduce")
    page.send(LONG_QUESTION)
    page.wait(lambda: page.text_of(".answer .text"), "no text came")
    assert page.run("return document.getAnimations().length") == 0
    stop(page, "button")
    page.wait_answered()


# Pastes or drops a file of these bytes on the page, as a browser does.
GIVE_FILE = """
const [kind, type, base64] = arguments;
const bytes = Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], 'a', {type}));
const event = kind === 'paste'
  ? new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true})
  : new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true});
document.getElementById('prompt').dispatchEvent(event);
"""


def test_pictures_are_pasted_and_dropped_and_sent(page: Page, browser: webdriver.Chrome) -> None:
    """With a server inside the page, whose model sees pictures."""
    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
    done = 'data: {"choices": [{"delta": {"content": "Seen"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    browser.execute_script(FAKE_SERVER, [done], 200, {})
    browser.execute_script(GIVE_FILE, "paste", "image/png", png)
    browser.execute_script(GIVE_FILE, "drop", "image/png", png)
    browser.execute_script(GIVE_FILE, "drop", "text/plain", png)
    page.wait(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#pictures img")) == 2, "two pictures")
    browser.find_element(By.CSS_SELECTOR, "#pictures button").click()
    page.wait(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#pictures img")) == 1, "one picture")
    browser.find_element(By.ID, "prompt").send_keys("What is it?", Keys.ENTER)
    page.wait(lambda: "Seen" in browser.find_element(By.CSS_SELECTOR, ".answer .text").text, "an answer")
    sent = [each for each in browser.execute_script("return window.requests") if each["path"] == "/v1/chat/completions"]
    [message] = json.loads(sent[-1]["body"])["messages"]
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}},
        {"type": "text", "text": "What is it?"},
    ]
    shown = browser.find_element(By.CSS_SELECTOR, "#turns .pictures img")
    assert shown.is_displayed() and not browser.find_element(By.ID, "pictures").is_displayed()
