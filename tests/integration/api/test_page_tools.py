"""Calls of tools, reasoning and JSON on the page at `GET /`, in a real browser.

A scripted dense worker behind the real gateway writes the answers: it says what a model may say, and the tests read the
prompts and forms that reach it. One test runs a real model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from services.pb import dense_pb2
from tests.support.chats.chat_models import make_chat_model, prompt_text, writes
from tests.support.clients.browser import console_messages, running_browser
from tests.support.clients.page import Page
from tests.support.cluster import Cluster, free_port
from tests.support.running_gateway import run, running_gateway
from tests.support.workers.fake_dense import FakeDense

MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&amp;"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with running_browser() as browser:
        yield browser


def call_text(name: str, arguments: str) -> str:
    """A call as a model of the format hermes writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def with_page(
    browser: webdriver.Chrome, tmp_path: Path, answers: list[str], test: Callable[[Page], None], **options: str
) -> list[dense_pb2.Submit]:
    """Runs `test` on the page of a gateway whose model gives `answers`; returns what reached the model."""
    dense = FakeDense(writes(*answers), max_model_len=4096)
    address = f"127.0.0.1:{free_port()}"  # browsers know no Unix sockets

    def drive() -> None:
        page = Page(browser, f"http://{address}/")
        page.open()
        test(page)
        assert page.browser.title == "Twostroke", "markup ran"
        assert console_messages(page.browser) == []

    async def body() -> None:
        model = make_chat_model(tmp_path / "model", options.pop("template", "hermes"))
        async with running_gateway(tmp_path, dense, model=model, http_address=address, **options):
            await asyncio.to_thread(drive)

    run(body())
    return dense.submits


def open_form(page: Page) -> None:
    """Unfolds the options of tools and JSON."""
    page.run("document.getElementById('tools').closest('details').open = true")


def insert_example(page: Page) -> dict[str, Any]:
    """Enters the example of a tool as a user does; returns the tool."""
    open_form(page)
    page.find("#tools-example").click()
    [tool] = json.loads(page.find("#tools").get_property("value"))
    return tool


def texts(page: Page, selector: str) -> list[str]:
    """The texts of all matching elements of the newest turn."""
    found = page.browser.find_elements(By.CSS_SELECTOR, f".turn:last-child {selector}")
    return [each.get_property("textContent") for each in found]


def test_without_entries_a_request_has_no_tools_and_no_form(browser: webdriver.Chrome, tmp_path: Path) -> None:
    def test(page: Page) -> None:
        assert page.find("#tools").get_property("value") == ""
        assert page.find("#response-format").get_property("value") == "text"
        page.send("Hello!")
        page.wait_answered()
        assert page.text_of(".answer .text") == "Hi."
        assert not page.last(".reasoning").is_displayed()
        assert not page.last(".results").is_displayed()
        assert texts(page, ".call") == []

    [submit] = with_page(browser, tmp_path, ["Hi."], test)
    assert "<tools>" not in prompt_text(submit)
    assert not submit.spec.sampling.HasField("structured_output")


def test_a_call_is_shown_and_its_result_continues_the_conversation(browser: webdriver.Chrome, tmp_path: Path) -> None:
    arguments = {"city": f"Paris {MARKUP}", "days": 3}
    answers = [
        f"<think>\nI need {MARKUP}\n</think>\n\nI look.\n" + call_text("get_weather", json.dumps(arguments)),
        "It is <b>sunny</b>.",
    ]
    tools: list[dict[str, Any]] = []

    def test(page: Page) -> None:
        tools.append(insert_example(page))
        page.send("How is the weather in Paris?")
        page.wait_answered()
        assert page.text_of(".answer .text") == "I look."
        assert texts(page, ".call figcaption") == ["Call of get_weather"]
        assert texts(page, ".call pre") == [json.dumps(arguments, indent=2)]
        reasoning = page.last(".reasoning")
        assert not reasoning.get_property("open") and not page.last(".thoughts").is_displayed()
        reasoning.find_element(By.CSS_SELECTOR, "summary").send_keys(Keys.ENTER)
        assert page.last(".thoughts").is_displayed()
        assert page.text_of(".thoughts") == f"I need {MARKUP}"
        assert page.run("return document.querySelectorAll('#turns :is(img, script, b)').length") == 0
        field = page.last(".results textarea")
        assert field.accessible_name == "Result of get_weather"
        field.send_keys("22 degrees & sunny", Keys.TAB, Keys.ENTER)  # the button follows
        page.wait(lambda: len(page.browser.find_elements(By.CSS_SELECTOR, ".turn")) == 2, "nothing was sent")
        page.wait_answered()
        assert page.text_of(".question") == "Result of get_weather: 22 degrees & sunny"
        assert page.text_of(".answer .text") == "It is <b>sunny</b>."
        assert [each.is_displayed() for each in page.browser.find_elements(By.CSS_SELECTOR, ".results")] == [False] * 2

    first, second = with_page(browser, tmp_path, answers, test, reasoning_parser="qwen3")
    [tool] = tools
    assert tool["function"]["name"] == "get_weather"
    assert list(tool["function"]["parameters"]["properties"]) == ["city"]
    assert json.dumps(tool) in prompt_text(first)
    history = prompt_text(second)
    assert history.startswith(prompt_text(first)), "the second prompt continues the first"
    added = history.removeprefix(prompt_text(first))
    assert "I look." in added and json.dumps(arguments) in added
    assert "<tool_response>\n22 degrees & sunny\n</tool_response>" in added


def test_the_reasoning_before_a_call_goes_back_with_its_result(browser: webdriver.Chrome, tmp_path: Path) -> None:
    def test(page: Page) -> None:
        insert_example(page)
        page.send("How is it in Rome?")
        page.wait_answered()
        page.last(".results button").click()  # an empty result is one, too
        page.wait(lambda: len(page.browser.find_elements(By.CSS_SELECTOR, ".turn")) == 2, "nothing was sent")
        page.wait_answered()

    answers = ["<think>\nRome is far.\n</think>\n\n" + call_text("get_weather", '{"city": "Rome"}'), "Nothing came."]
    _, second = with_page(browser, tmp_path, answers, test, template="qwen3")
    assert "<think>\nRome is far.\n</think>" in prompt_text(second)


def test_each_of_several_calls_gets_its_own_result(browser: webdriver.Chrome, tmp_path: Path) -> None:
    both = call_text("get_weather", '{"city": "Rome"}') + "\n" + call_text("get_weather", '{"city": "Oslo"}')

    def test(page: Page) -> None:
        insert_example(page)
        page.send("Rome or Oslo?")
        page.wait_answered()
        assert [json.loads(text) for text in texts(page, ".call pre")] == [{"city": "Rome"}, {"city": "Oslo"}]
        for field, result in zip(
            page.browser.find_elements(By.CSS_SELECTOR, ".results textarea"), ("warm", "cold"), strict=True
        ):
            field.send_keys(result)
        page.last(".results button").click()
        page.wait(lambda: len(page.browser.find_elements(By.CSS_SELECTOR, ".turn")) == 2, "nothing was sent")
        page.wait_answered()
        assert page.text_of(".answer .text") == "Rome."

    _, second = with_page(browser, tmp_path, [both, "Rome."], test)
    history = prompt_text(second)
    parts = ['{"city": "Rome"}', '{"city": "Oslo"}', "warm", "cold"]
    places = [history.rindex(part) for part in parts]
    assert places == sorted(places)


def test_calls_without_results_leave_the_conversation(browser: webdriver.Chrome, tmp_path: Path) -> None:
    def test(page: Page) -> None:
        insert_example(page)
        page.send("How is it in Rome?")
        page.wait_answered()
        assert page.last(".results").is_displayed()
        page.send("Never mind.")
        page.wait_answered()
        assert page.text_of(".answer .text") == "Well."
        assert not page.browser.find_element(By.CSS_SELECTOR, ".results").is_displayed()

    _, second = with_page(browser, tmp_path, [call_text("get_weather", '{"city": "Rome"}'), "Well."], test)
    assert "Never mind." in prompt_text(second) and "Rome" not in prompt_text(second)


def test_a_call_that_is_cut_off_asks_for_no_result(browser: webdriver.Chrome, tmp_path: Path) -> None:
    def test(page: Page) -> None:
        insert_example(page)
        page.fill("max_tokens", "50")
        page.send("How is it in Rome?")
        page.wait_answered()
        [shown] = texts(page, ".call pre")
        assert shown and '{"city": "Rome, the city of seven hills"}'.startswith(shown)
        assert "limit" in page.text_of(".finish dd")
        assert not page.last(".results").is_displayed()

    with_page(browser, tmp_path, [call_text("get_weather", '{"city": "Rome, the city of seven hills"}')], test)


def test_an_answer_in_json_is_formatted_without_a_change_of_its_values(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    answer = r'{"b": [1e400, 12345678901234567890, {}, []], "2": "a\"{,}\u00e9 <b>", "1": true, "1": null}'
    formatted = r"""{
  "b": [
    1e400,
    12345678901234567890,
    {},
    []
  ],
  "2": "a\"{,}\u00e9 <b>",
  "1": true,
  "1": null
}"""
    deep = "[" * 500 + "]" * 500  # the page shows it again for every token, which takes long on a busy machine

    def test(page: Page) -> None:
        open_form(page)
        page.run(
            "const form = document.getElementById('response-format'); form.value = 'json_object';"
            "form.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        page.send("JSON, please.")
        page.wait_answered()
        text = page.last(".answer .text")
        assert text.get_property("textContent") == formatted
        assert "monospace" in text.value_of_css_property("font-family")
        page.find("#new-chat").click()
        page.send("Deeper.")
        page.wait_answered()
        assert "".join(page.text_of(".answer .text").split()) == deep
        assert len(page.text_of(".answer .text")) < 200 * len(deep)

    submits = with_page(browser, tmp_path, [answer, deep], test)
    assert all(submit.spec.sampling.HasField("structured_output") for submit in submits)


def test_text_that_only_begins_like_json_stays_as_it_is(browser: webdriver.Chrome, tmp_path: Path) -> None:
    def test(page: Page) -> None:
        page.send("Hello!")
        page.wait_answered()
        assert page.text_of(".answer .text") == "[1, 2] are  two"
        assert "monospace" not in page.last(".answer .text").value_of_css_property("font-family")

    with_page(browser, tmp_path, ["[1, 2] are  two"], test)


@pytest.mark.parametrize("field", ["tools", "schema"])
def test_an_entry_that_is_not_json_is_named_before_anything_is_sent(
    browser: webdriver.Chrome, tmp_path: Path, field: str
) -> None:
    def test(page: Page) -> None:
        open_form(page)
        page.find("#response-format").send_keys("JSON by schema")
        page.fill("schema", "{}")
        page.fill(field, "{city")
        page.send("Hello!")
        page.wait_answered()
        assert page.text_of(".problem").startswith(f"{field.title()}: not JSON: ")
        assert page.run("return document.activeElement.id") == field

    assert with_page(browser, tmp_path, ["Hi."], test) == []


def test_a_real_model_answers_by_the_schema_of_the_page(cluster: Cluster, browser: webdriver.Chrome) -> None:
    page = Page(browser, f"http://{cluster.http_address}/")
    page.open()
    open_form(page)
    assert not page.find("#schema").is_displayed()
    page.find("#response-format").send_keys("JSON by schema")
    page.fill("schema", json.dumps(SCHEMA))
    page.browser.refresh()  # the entries stay
    assert json.loads(page.find("#schema").get_property("value")) == SCHEMA
    assert page.find("#schema-field").get_property("hidden") is False
    page.send("Where to, and for how long?")
    page.wait_answered()
    shown = page.text_of(".answer .text")
    jsonschema.validate(json.loads(shown), SCHEMA)
    assert shown == json.dumps(json.loads(shown), indent=2)
    assert console_messages(page.browser) == []


def test_every_new_control_has_a_name(cluster: Cluster, browser: webdriver.Chrome) -> None:
    page = Page(browser, f"http://{cluster.http_address}/")
    page.open()
    open_form(page)
    page.find("#response-format").send_keys("JSON by schema")
    for selector in ("#tools", "#tools-example", "#response-format", "#schema"):
        control = page.find(selector)
        assert control.is_displayed() and control.accessible_name, selector
