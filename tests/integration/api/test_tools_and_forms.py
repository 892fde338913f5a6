"""Calls together with a form of the answer, over three APIs, whole and streamed: a call that is demanded is made.

Its arguments are valid against the tool's schema, which has references, enumerations and defaults, and there is no text
beside it. The answer without a call is tested in `test_embedded_model_tools.py`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

from tests.support.cluster import Cluster

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "such as 'Vienna'", "default": "Vienna", "maxLength": 30},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "options": {"$ref": "#/$defs/Options", "description": "what else to tell"},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {
            "Options": {
                "type": "object",
                "properties": {
                    "has_forecast": {"type": "boolean", "default": False},
                    "language": {"type": "string", "enum": ["en", "ja"], "default": "en"},
                },
                "additionalProperties": False,
            }
        },
    },
    "get_forecast": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 30},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
REPORT = {"type": "object", "properties": {"summary": {"type": "string", "maxLength": 60}}, "required": ["summary"]}
QUESTION = "What is the weather in Paris and Rome?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
NAMED = "get_forecast"
Calls = list[tuple[str, str]]  # name and arguments
Ask = Callable[..., tuple[Calls, str, str | None]]  # the calls, the text, and why the answer ended


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=f"http://{cluster.http_address}", timeout=60) as http:
        yield http


def api_of(http: httpx2.Client) -> openai.OpenAI:
    return openai.OpenAI(api_key="none", base_url=f"{http.base_url}/v1", http_client=http, max_retries=0)


def ask_chat(http: httpx2.Client, choice: str, is_streamed: bool, max_tokens: int = 400, **more: Any) -> Any:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": choice == "auto"}}
        for name, schema in SCHEMAS.items()
    ]
    tool_choice: Any = {"type": "function", "function": {"name": NAMED}} if choice == "named" else choice
    form = {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT, "strict": True}}
    options: Any = {"model": "tiny-llama", "messages": MESSAGES, "temperature": 0, "max_tokens": max_tokens}
    options |= {"tools": tools, "tool_choice": tool_choice, "response_format": form} | more
    api = api_of(http)
    if not is_streamed:
        [choice_object] = api.chat.completions.create(**options).choices
        message = choice_object.message
        calls = [(each.function.name, each.function.arguments) for each in message.tool_calls or ()]
        return calls, message.content or "", choice_object.finish_reason
    found: list[list[str]] = []
    text, reasons = "", []
    for chunk in api.chat.completions.create(stream=True, **options):
        [part] = chunk.choices
        assert not reasons, "nothing may follow the finish"
        for piece in part.delta.tool_calls or ():
            if piece.index == len(found):
                assert piece.id is not None
                found.append([piece.function.name, ""])
            else:
                assert piece.index == len(found) - 1 and piece.function.name is None, "each name comes once"
            found[-1][1] += piece.function.arguments or ""
        text += part.delta.content or ""
        reasons += [part.finish_reason] if part.finish_reason else []
    return [(name, arguments) for name, arguments in found], text, *reasons


def ask_responses(http: httpx2.Client, choice: str, is_streamed: bool, max_tokens: int = 400, **more: Any) -> Any:
    tools = [
        {"type": "function", "name": name, "parameters": schema, "strict": choice == "auto"}
        for name, schema in SCHEMAS.items()
    ]
    tool_choice: Any = {"type": "function", "name": NAMED} if choice == "named" else choice
    form = {"format": {"type": "json_schema", "name": "report", "schema": REPORT, "strict": True}}
    options: Any = {"model": "tiny-llama", "input": QUESTION, "temperature": 0, "max_output_tokens": max_tokens}
    options |= {"tools": tools, "tool_choice": tool_choice, "text": form} | more
    api = api_of(http)
    if is_streamed:
        events = list(api.responses.create(stream=True, **options))
        response, pieces = events[-1].response, defaultdict(str)
        for event in events:
            if event.type == "response.function_call_arguments.delta":
                pieces[event.item_id] += event.delta
        calls = [(item.name, pieces[item.id]) for item in response.output if item.type == "function_call"]
    else:
        response = api.responses.create(**options)
        calls = [(item.name, item.arguments) for item in response.output if item.type == "function_call"]
    reason = None if response.incomplete_details is None else response.incomplete_details.reason
    return calls, response.output_text, reason


def ask_messages(http: httpx2.Client, choice: str, is_streamed: bool, max_tokens: int = 400, **more: Any) -> Any:
    tools = [{"name": name, "input_schema": schema, "strict": choice == "auto"} for name, schema in SCHEMAS.items()]
    tool_choice: Any = {"type": "any" if choice == "required" else choice}
    if choice == "named":
        tool_choice = {"type": "tool", "name": NAMED}
    if more.pop("parallel_tool_calls", True) is False:
        tool_choice["disable_parallel_tool_use"] = True
    body = {"model": "tiny-llama", "messages": MESSAGES, "temperature": 0, "max_tokens": max_tokens, **more}
    body |= {"tools": tools, "tool_choice": tool_choice, "stream": is_streamed}
    body["output_config"] = {"format": {"type": "json_schema", "schema": REPORT}}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    if not is_streamed:
        message = answer.json()
        uses = [each for each in message["content"] if each["type"] == "tool_use"]
        text = "".join(each["text"] for each in message["content"] if each["type"] == "text")
        return [(each["name"], json.dumps(each["input"])) for each in uses], text, message["stop_reason"]
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data")]
    blocks = {each["index"]: each["content_block"] for each in events if each["type"] == "content_block_start"}
    pieces: defaultdict[int, str] = defaultdict(str)
    for each in events:
        if each["type"] == "content_block_delta":
            pieces[each["index"]] += each["delta"].get("partial_json") or each["delta"].get("text", "")
    calls = [(block["name"], pieces[i]) for i, block in blocks.items() if block["type"] == "tool_use"]
    text = "".join(pieces[i] for i, block in blocks.items() if block["type"] == "text")
    [reason] = [each["delta"]["stop_reason"] for each in events if each["type"] == "message_delta"]
    return calls, text, reason


APIS: dict[str, tuple[Ask, dict[str, str | None], str]] = {  # why an answer with calls ends, and one that is cut off
    "chat": (ask_chat, {"required": "tool_calls", "named": "stop", "auto": "tool_calls"}, "length"),
    "responses": (ask_responses, dict.fromkeys(("required", "named", "auto")), "max_output_tokens"),
    "messages": (ask_messages, dict.fromkeys(("required", "named", "auto"), "tool_use"), "max_tokens"),
}


@pytest.mark.parametrize("choice", ["required", "named", "auto"])
@pytest.mark.parametrize("api", APIS)
def test_a_form_does_not_keep_the_model_from_its_calls(http: httpx2.Client, api: str, choice: str) -> None:
    """With auto the tools are strict, and this model calls them for such a question."""
    ask, reasons, _ = APIS[api]
    with ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(ask, http, choice, is_streamed) for is_streamed in (False, True)]
        single_run = threads.submit(ask, http, choice, True, parallel_tool_calls=False)
    answers = [run.result() for run in runs]
    for calls, text, reason in answers:
        assert calls and not text and reason == reasons[choice]
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        if choice == "named":
            assert [name for name, _ in calls] == [NAMED]
    whole, streamed = ([(name, json.loads(arguments)) for name, arguments in calls] for calls, _, _ in answers)
    assert whole == streamed
    single, _, _ = single_run.result()
    assert [(name, json.loads(arguments)) for name, arguments in single] == whole[:1]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
def test_a_demanded_call_that_is_cut_off_before_its_name_is_no_call(
    http: httpx2.Client, api: str, is_streamed: bool
) -> None:
    ask, _, reason = APIS[api]
    calls, _, found = ask(http, "required", is_streamed, max_tokens=1)
    assert (calls, found) == ([], reason)
