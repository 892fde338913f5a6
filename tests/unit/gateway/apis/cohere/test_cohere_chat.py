"""Cohere's chats: compared with OpenAI's chats, and with the events of Cohere's reference."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from services.gateway.apis.cohere.conversion import cohere_message
from services.gateway.apis.cohere.schema import CohereChatRequest
from tests.support.chats.chat_models import TIME, WEATHER, make_chat_model, prompt_text, with_chat_model
from tests.support.clients.gateway_calls import EOS, ids
from tests.support.clients.http_clients import async_client
from tests.support.clients.http_gateway import CHATS, MODEL, USER, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense, fake_logprob

URL = "/v2/chat"
TEXT = " in Łódź, 東京."
BODY: dict[str, Any] = {"model": MODEL, "messages": USER}
CITY = {"city": 'Paris, "Île-de-France"\n', "days": 3}
CALL = f'<tool_call>\n{json.dumps({"name": "get_weather", "arguments": CITY})}\n</tool_call>'
TWO = f'I look.\n{CALL}\n<tool_call>{{"name": "get_time", "arguments": {{}}}}</tool_call>'


def until_eos() -> FakeDense:
    return FakeDense(lambda submit: [*ids(TEXT), EOS][: submit.spec.max_tokens])


def events_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    """The objects of a stream, each of which names its event."""
    assert answer.status_code == 200, answer.text
    *events, end, rest = answer.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds of the events, each of which must be allowed where it comes."""
    first, *middle, last = events
    assert (first["type"], last["type"]) == ("message-start", "message-end")
    assert first["delta"]["message"] == {
        "role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": [],
    }
    content: list[Any] = []
    calls: list[Any] = []
    opened: str | None = None
    for event in middle:
        kind, _, step = event["type"].rpartition("-")
        grown = event.get("delta", {}).get("message", {}).get("content" if kind == "content" else "tool_calls", {})
        if step == "start":
            assert opened is None
            opened = kind
            (content if kind == "content" else calls).append(grown)
        assert opened == kind and event["index"] == len(content if kind == "content" else calls) - 1
        if step == "end":
            opened = None
        elif step == "delta" and kind == "content":
            [(name, text)] = grown.items()
            content[-1][name] += text
        elif step == "delta":
            calls[-1]["function"]["arguments"] += grown["function"]["arguments"]
    assert opened is None
    parts = {"content": content, "tool_calls": calls}
    return {"role": "assistant", **{name: part for name, part in parts.items() if part}}


@pytest.mark.parametrize("url", [URL, "/cohere/v2/chat"])
def test_a_stream_builds_up_the_whole_answer(url: str, tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for options, reason, text in (
            ({}, "COMPLETE", TEXT), ({"max_tokens": 2}, "MAX_TOKENS", None),
            ({"stop_sequences": [","]}, "STOP_SEQUENCE", TEXT.partition(",")[0]),
        ):  # fmt: skip
            whole = (await client.post(url, json=BODY | options)).json()
            events = events_of(await client.post(url, json=BODY | options | {"stream": True}))
            assert message_of(events) == whole["message"]
            assert events[-1]["delta"] == {"finish_reason": reason, "usage": whole["usage"]}
            assert whole["finish_reason"] == reason and whole["id"]
            assert events[0]["id"] == events[-1]["id"]
            [block] = whole["message"]["content"]
            assert block["type"] == "text" and (text is None or block["text"] == text)
            spec = dense.submits[-1].spec
            num_tokens = min(len(ids(TEXT)) + 1, spec.max_tokens)
            counts = {"input_tokens": len(spec.prompt_token_ids), "output_tokens": num_tokens}
            if reason != "STOP_SEQUENCE":
                assert whole["usage"] == {"billed_units": counts, "tokens": counts, "cached_tokens": 0}

    dense = until_eos()
    with_client(tmp_path, dense, test)


def test_options_have_coheres_names(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        sampling = {"temperature": 0.25, "frequency_penalty": 0.5, "presence_penalty": 0.25, "seed": 7}
        ours = {"k": 3, "p": 0.5, "stop_sequences": ["x"], "priority": 5}
        theirs = {"top_k": 3, "top_p": 0.5, "stop": ["x"], "priority": 5}
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        forms: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"type": "text"}, {"type": "text"}), ({"type": "json_object"}, {"type": "json_object"}),
            (
                {"type": "json_object", "json_schema": schema},
                {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            ),
        ]
        for form, openai_form in forms:
            for url, options, each in ((URL, ours, form), (CHATS, theirs, openai_form)):
                answer = await client.post(url, json=BODY | sampling | options | {"response_format": each})
                assert answer.status_code == 200, answer.text
            first, second = (submit.spec for submit in dense.submits[-2:])
            for spec in (first, second):
                spec.request_id = ""
                spec.sampling.structured_output.field_name = ""
            assert first.sampling.seed == 7
            assert first == second

    dense = FakeDense(lambda submit: [*ids('{"a":1}'), EOS])
    with_client(tmp_path, dense, test)


def test_log_probabilities_are_those_of_all_tokens(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        truth = [([token_id], [pytest.approx(fake_logprob(token_id))]) for token_id in (*ids(TEXT), EOS)]
        whole = (await client.post(URL, json=BODY | {"logprobs": True})).json()["logprobs"]
        assert [(each["token_ids"], each["logprobs"]) for each in whole] == truth
        events = events_of(await client.post(URL, json=BODY | {"logprobs": True, "stream": True}))
        given = [event["logprobs"] for event in events if "logprobs" in event]
        flat = [pair for each in given for pair in zip(each["token_ids"], each["logprobs"], strict=True)]
        assert [([token_id], [logprob]) for token_id, logprob in flat] == truth

    with_client(tmp_path, until_eos(), test)


def test_calls_of_tools_and_their_results(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        body = {"model": "model", "messages": USER, "tools": [WEATHER, TIME]}
        async with async_client(gateway.http_address) as client:
            whole = (await client.post(URL, json=body)).json()
            message = whole["message"]
            assert whole["finish_reason"] == "TOOL_CALL" and message["content"] == [{"type": "text", "text": "I look."}]
            first, second = message["tool_calls"]
            assert (first["type"], first["function"]["name"], second["function"]["name"]) == (
                "function", "get_weather", "get_time",
            )
            assert json.loads(first["function"]["arguments"]) == CITY
            events = events_of(await client.post(URL, json=body | {"stream": True}))
            streamed = message_of(events)
            assert streamed["content"] == message["content"]
            functions = [[each["function"] for each in given["tool_calls"]] for given in (message, streamed)]
            assert functions[0] == functions[1]
            only_call = (await client.post(URL, json=body)).json()["message"]
            assert "content" not in only_call and len(only_call["tool_calls"]) == 1
            result = {"weather": "sunny"}
            turns = [
                *USER, {**message, "content": message["content"]},
                {
                    "role": "tool",
                    "tool_call_id": first["id"],
                    "content": [{"type": "document", "document": {"data": result}}],
                },
                {"role": "tool", "tool_call_id": second["id"], "content": "noon"},
            ]
            empty = (await client.post(URL, json=body | {"messages": turns})).json()
            assert empty["message"] == {"role": "assistant", "content": [{"type": "text", "text": "Fine."}]}

    dense = with_chat_model(tmp_path, "hermes", [TWO, TWO, CALL, "Fine."], test)
    prompt = prompt_text(dense.submits[-1])
    assert '{"weather":"sunny"}' in prompt and "noon" in prompt and "I look." in prompt
    assert '"get_weather"' in prompt


def test_a_choice_demands_or_forbids_calls(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        body = {"model": "model", "messages": USER, "tools": [WEATHER, TIME]}
        async with async_client(gateway.http_address) as client:
            for options in ({"tool_choice": "REQUIRED"}, {"tool_choice": "NONE"}, {"strict_tools": True}, {}):
                assert (await client.post(URL, json=body | options)).status_code == 200

    dense = with_chat_model(tmp_path, "hermes", [CALL], test)
    demanded, forbidden, strict, free = (submit.spec.sampling for submit in dense.submits)
    assert "get_time" in demanded.structured_output.grammar and '"city"' in strict.structured_output.grammar
    assert not forbidden.HasField("structured_output") and not free.HasField("structured_output")
    assert "get_weather" not in prompt_text(dense.submits[1])


def test_reasoning_is_a_block_of_its_own(tmp_path: Path) -> None:
    async def test(api: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
        body = {"model": "model", "messages": USER, "thinking": {"type": "enabled", "token_budget": 50}}
        async with async_client(gateway.http_address) as client:
            whole = (await client.post(URL, json=body)).json()["message"]
            assert whole["content"] == [
                {"type": "thinking", "thinking": "Two and two."}, {"type": "text", "text": "Four."},
            ]
            assert message_of(events_of(await client.post(URL, json=body | {"stream": True}))) == whole
            body |= {"messages": [*USER, whole, *USER], "thinking": {"type": "disabled"}}
            assert (await client.post(URL, json=body)).status_code == 200

    dense = with_chat_model(tmp_path, "qwen3", ["<think>\nTwo and two.\n</think>\n\nFour."], test)
    assert prompt_text(dense.submits[-1]).rstrip().endswith("</think>"), "the template closes the reasoning"


def test_documents_are_a_variable_of_the_chat_template(tmp_path: Path) -> None:
    documents = [{"id": "a", "data": {"title": "First"}}, {"data": "Second"}, "Third"]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = await client.post(URL, json=BODY | {"model": "model", "documents": documents, "max_tokens": 1})
        assert answer.status_code == 200, answer.text

    model = make_chat_model(tmp_path / "model", "hermes")
    template = "{% for d in documents %}[{{ d.title or d.text }}]{% endfor %}{{ messages[0].content }}"
    (model / "chat_template.jinja").write_text(template)
    dense = FakeDense(lambda submit: [5])
    with_client(tmp_path, dense, test, model=model)
    assert prompt_text(dense.submits[-1]) == f"[First][Second][Third]{USER[0]['content']}"


def test_errors_are_coheres(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"model": "other"}, 404, "'other' is not served here"), ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, 400, "messages[0].role"), ({"p": 2}, 400, "p is 2"),
        ({"k": "x"}, 400, "k is 'x'"), ({"max_tokens": 0}, 400, "max_tokens"),
        ({"tool_choice": "auto"}, 400, "tool_choice"),
        ({"response_format": {"type": "json_object", "schema": {"type": "bad"}}}, 400, "response_format"),
        ({"raw_prompting": True}, 400, "raw_prompting"), ({"tools": [5]}, 400, "tools[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "film"}]}]}, 400, "messages[0].content[0]"),
    ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for change, status, word in wrong:
            answer = await client.post(URL, json=BODY | change)
            assert answer.status_code == status and answer.json().keys() == {"id", "message"}, answer.text
            assert answer.json()["message"].startswith(word) or word in answer.json()["message"], answer.text
        async with client.stream("POST", URL, json=BODY | {"stream": True, "max_tokens": 1000}) as stream:
            lines = stream.aiter_lines()
            while "content-delta" not in await anext(lines):
                pass
            await dense.kill()
            text = "\n".join([line async for line in lines])
        last = json.loads(text.strip().split("\n\n")[-1].partition("data: ")[2])
        assert last["delta"]["finish_reason"] == "ERROR" and "worker" in last["delta"]["error"] and "[DONE]" not in text

    dense = FakeDense(lambda submit: ids(" a") * 1000, step_s=0.01)
    with_client(tmp_path, dense, test, connect_timeout_s=1.0)


def test_a_message_of_many_parts_is_read_in_linear_time() -> None:
    long = "a" * 1_500_000 + "\N{GRINNING FACE}"
    parts = [[{"type": "thinking", "thinking": long}, *[{"type": "thinking", "thinking": "b"}] * 1000]]
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    parts.append([{"type": "text", "text": long}, *[picture] * 500, {"type": "text", "text": "c"}, picture])
    messages = [{"role": "user", "content": each} for each in parts]
    body = CohereChatRequest.model_validate(BODY | {"messages": messages})
    begin_s = time.thread_time()
    thought, shown = cohere_message(body, "id", {}, reasons=False).chat.messages
    assert time.thread_time() - begin_s < 0.2  # nothing else runs meanwhile; one copy for each part took 2 s
    assert thought.reasoning == long + "b" * 1000
    assert shown.content == long + "c"
    assert [each.position for each in shown.pictures] == [len(long)] * 500 + [len(long) + 1]
