"""A form that cannot be used is an error of the field that it came from, and the message begins with its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2

from tests.support.clients.http_gateway import CHAT, CHATS, COMPLETIONS, MODEL, PROMPT, check_error, say, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

SCHEMA: Any = {"type": "object", "properties": {"a": {"not": {}}}}
LOOK_AHEAD = "(?=a)b"
UNKNOWN_RULE = 'root ::= "a" missing'
TAG: Any = {"type": "structural_tag", "format": {"type": "xml"}}
NESTED_TAG: Any = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
NAMED: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

# Body, name of the field, and words of the message.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": NAMED}, "response_format", "not"),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format", "not"),  # as SGLang's clients
    ({"response_format": TAG}, "response_format", "'xml'"),
    ({"guided_json": SCHEMA}, "guided_json", "not"),
    ({"guided_regex": LOOK_AHEAD}, "guided_regex", "look-ahead"),
    ({"guided_grammar": UNKNOWN_RULE}, "guided_grammar", "missing"),
    ({"json_schema": SCHEMA}, "json_schema", "not"),
    ({"regex": LOOK_AHEAD}, "regex", "look-ahead"),
    ({"ebnf": UNKNOWN_RULE}, "ebnf", "missing"),
    ({"grammar": UNKNOWN_RULE}, "grammar", "missing"),
    ({"structural_tag": json.dumps(NESTED_TAG)}, "structural_tag", "not"),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", "not"),
    ({"structured_outputs": {"regex": LOOK_AHEAD}}, "structured_outputs.regex", "look-ahead"),
    ({"structured_outputs": {"grammar": UNKNOWN_RULE}}, "structured_outputs.grammar", "missing"),
    ({"structured_outputs": {"structural_tag": TAG}}, "structured_outputs.structural_tag", "'xml'"),
]
ROOM = 7_500_000  # of all requests: a form takes about 4 MB, and its body 0.8
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TOOL: Any = {"name": "find_it", "strict": True}
ONE: Any = {"name": "one"}
INPUT: Any = {"input": "Hi"}
MESSAGE: Any = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}


def test_errors_of_forms_name_the_field_of_the_body(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for change, field, words in REFUSED:
            for path, body in ((COMPLETIONS, PROMPT), (CHATS, CHAT)):
                response = await client.post(path, json=body | change)
                check_error(response, 400, field, f"{field} cannot be used: ", words)
                for own in ("%json", "x-guidance", "llguidance", "rule_"):
                    assert own not in response.text, "it shows our own grammar"

    dense = FakeDense(say("a"))
    with_client(tmp_path, dense, test)
    assert not dense.submits


def test_equal_forms_of_different_fields_have_their_own_names_though_the_result_is_kept(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for field in ("guided_regex", "regex", "guided_regex"):
            check_error(await client.post(COMPLETIONS, json=PROMPT | {field: LOOK_AHEAD}), 400, field, field)

    with_client(tmp_path, FakeDense(say("a")), test)


def test_the_memory_of_compiled_forms_is_limited_in_sum_and_given_back(tmp_path: Path) -> None:
    """Two forms do not fit at once, and the second one waits only as long as it may."""

    def form(number: int) -> dict[str, Any]:
        return PROMPT | {"guided_json": {"enum": [f"{number} value {i}" for i in range(10_000)]}, "max_tokens": 1000}

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        async with client.stream("POST", COMPLETIONS, json=form(1) | {"stream": True}) as first:
            pieces = first.aiter_bytes()
            await anext(pieces)
            again = await client.post(COMPLETIONS, json=form(1) | {"max_tokens": 1})
            assert again.status_code == 200, again.text
            refused = await client.post(COMPLETIONS, json=form(2) | {"max_tokens": 1})
            assert refused.status_code == 429, refused.text
            message = refused.json()["error"]["message"]
            assert "for the compiled form of the output" in message and f"{ROOM} (gateway.max_held_bytes)" in message
        for other in (2, 3):  # the first one has ended
            assert (await client.post(COMPLETIONS, json=form(other) | {"max_tokens": 1})).status_code == 200

    dense = FakeDense(say("a" * 1000), step_s=0.05)
    with_client(tmp_path, dense, test, max_held_bytes=ROOM, max_held_wait_s=0.05)


def test_other_vendors_fields_have_their_names(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        space: Any = {"type": "namespace", "name": "space", "description": "x", "tools": [
            {"type": "function", "parameters": {"type": "object"}, **ONE},
            {"type": "function", "parameters": SCHEMA, **TOOL},
        ]}  # fmt: skip
        response = await client.post(RESPONSES, json=INPUT | {"tools": [space]})
        check_error(response, 400, "tools[0].tools[1].parameters", "'space__find_it' cannot be enforced", "not")
        form = {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}
        response = await client.post(RESPONSES, json=INPUT | form)
        check_error(response, 400, "text.format", "text.format cannot be used: ", "not")
        for field, body in {
            "output_format": {"output_format": {"type": "json_schema", "schema": SCHEMA}},
            "output_config.format": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        }.items():
            response = await client.post(MESSAGES, json=MESSAGE | body)
            assert response.status_code == 400
            assert response.json()["error"]["message"].startswith(f"{field} cannot be used: "), response.text
        tools = [{"input_schema": {"type": "object"}, **ONE}, {"input_schema": SCHEMA, **TOOL}]
        response = await client.post(MESSAGES, json=MESSAGE | {"tools": tools})
        assert response.status_code == 400
        assert "'find_it' cannot be enforced" in response.json()["error"]["message"], response.text
        guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": LOOK_AHEAD}
        response = await client.post("/v2/models/ensemble/generate", json={"text_input": "a", "max_tokens": 1} | guide)
        assert response.status_code == 400 and "guided_decoding_guide cannot be used" in response.text

    with_client(tmp_path, FakeDense(say("a")), test)
