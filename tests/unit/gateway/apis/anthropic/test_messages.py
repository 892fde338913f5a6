"""POST /v1/messages: what the model is asked, and the objects and events of answers, by Anthropic's reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2

from tests.support.clients.gateway_calls import EOS, REFERENCE, ids, text_of
from tests.support.clients.http_clients import named_events
from tests.support.clients.http_gateway import MODEL, say, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": HI}
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-beta-2026-01-01"}
TEXT = " Łódź, 東京 🙂🙃 cities."


def prompt_of(messages: list[dict[str, str]], **options: Any) -> list[int]:
    """The token ids of a chat, by the reference tokenizer."""
    text = REFERENCE.apply_chat_template(messages, tokenize=False, **({"add_generation_prompt": True} | options))
    return REFERENCE.encode(text, add_special_tokens=False)


def test_a_whole_message(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        response = await client.post(MESSAGES, json=BODY, headers=HEADERS)
        assert response.status_code == 200, response.text
        request_id = response.headers["request-id"]
        assert request_id == response.headers["x-request-id"]
        num_prompt_tokens = len(prompt_of(HI))
        assert response.json() == {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [{"type": "text", "text": TEXT}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": num_prompt_tokens - 2,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 2,
                "output_tokens": len(ids(TEXT)) + 1,
            },
        }

    dense = FakeDense(lambda submit: [*ids(TEXT), EOS])
    dense.num_cached_tokens = 2
    with_client(tmp_path, dense, test)


def test_a_streamed_message_is_the_whole_one_in_pieces(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        whole = (await client.post(MESSAGES, json=BODY, headers={"x-request-id": "a"})).json()
        response = await client.post(MESSAGES, json={**BODY, "stream": True}, headers={"x-request-id": "a"})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        start, ping, begin, *deltas, stop, end, last = named_events(response.text)
        message = start["message"]
        assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
        assert message["usage"]["input_tokens"] == whole["usage"]["input_tokens"] + 2, "cached tokens are not known yet"
        assert ping == {"type": "ping"}
        assert begin == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        assert len(deltas) > 1
        assert {(each["type"], each["index"], each["delta"]["type"]) for each in deltas} == {
            ("content_block_delta", 0, "text_delta")
        }
        text = "".join(each["delta"]["text"] for each in deltas)
        assert stop == {"type": "content_block_stop", "index": 0}
        assert (end["type"], last) == ("message_delta", {"type": "message_stop"})
        content = [{"type": "text", "text": text}]
        assert {**message, "content": content, **end["delta"], "usage": end["usage"]} == whole

    dense = FakeDense(lambda submit: [*ids(TEXT), EOS], step_s=0.01)
    dense.num_cached_tokens = 2
    with_client(tmp_path, dense, test)


def test_why_an_answer_ends(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        cut = (await client.post(MESSAGES, json={**BODY, "max_tokens": 2})).json()
        assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
        assert cut["content"][0]["text"] == text_of(ids(" one two three")[:2])
        stopped = (await client.post(MESSAGES, json={**BODY, "stop_sequences": ["zzz", "two"]})).json()
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
        assert stopped["content"][0]["text"] == " one "
        empty = (await client.post(MESSAGES, json={**BODY, "stop_sequences": [" one"]})).json()
        assert (empty["content"], empty["stop_sequence"]) == ([], " one")

    with_client(tmp_path, FakeDense(say(" one two three")), test)


def test_system_and_blocks_become_a_chat(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        cached = {"cache_control": {"type": "ephemeral"}}
        body = {
            "model": MODEL,
            "max_tokens": 1,
            "system": [{"type": "text", "text": "Be brief.", **cached}, {"type": "text", "text": "Be kind."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
                {"role": "user", "content": "three"},
                {"role": "assistant", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
                {"role": "user", "content": "Go on"},
            ],
        }
        assert (await client.post(MESSAGES, json=body)).status_code == 200
        count = (await client.post(COUNT, json={name: body[name] for name in ("model", "system", "messages")})).json()
        assert count == {"input_tokens": len(dense.submits[0].spec.prompt_token_ids)}
        plain = {**body, "system": "Be brief.\nBe kind."}
        assert (await client.post(MESSAGES, json=plain)).status_code == 200

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)
    expected = prompt_of(
        [
            {"role": "system", "content": "Be brief.\nBe kind."},
            {"role": "user", "content": "One\ntwo\nthree"},
            {"role": "assistant", "content": "AB"},
            {"role": "user", "content": "Go on"},
        ]
    )
    assert [list(submit.spec.prompt_token_ids) for submit in dense.submits] == [expected, expected]


def test_a_last_message_of_the_assistant_is_continued(tmp_path: Path) -> None:
    messages = [*HI, {"role": "assistant", "content": "The answer is"}]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = (await client.post(MESSAGES, json={**BODY, "max_tokens": 1, "messages": messages})).json()
        assert answer["content"] == [{"type": "text", "text": " one"}], "without the part that the client wrote"

    dense = FakeDense(say(" one"))
    with_client(tmp_path, dense, test)
    expected = prompt_of(messages, add_generation_prompt=False, continue_final_message=True)
    assert list(dense.submits[0].spec.prompt_token_ids) == expected


def test_the_billing_line_of_claude_code_is_not_part_of_the_prompt(tmp_path: Path) -> None:
    def lines(build: str) -> str:
        return f"x-anthropic-billing-header: cc_version=2.1.{build}; cc_entrypoint=cli; cch={build};"

    systems: list[Any] = [
        [{"type": "text", "text": "You are an agent."}],
        [{"type": "text", "text": lines("a1")}, {"type": "text", "text": "You are an agent."}],
        [{"type": "text", "text": lines("b2")}, {"type": "text", "text": "You are an agent."}],
        lines("c3") + "\nYou are an agent.",
    ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for system in systems:
            assert (await client.post(MESSAGES, json={**BODY, "system": system})).status_code == 200
        only = [{"role": "system", "content": lines("d4")}, *HI]
        assert (await client.post(MESSAGES, json={**BODY, "messages": only})).status_code == 200

    dense = FakeDense(lambda submit: [EOS])
    with_client(tmp_path, dense, test)
    *prompts, last = [list(submit.spec.prompt_token_ids) for submit in dense.submits]
    assert prompts == [prompt_of([{"role": "system", "content": "You are an agent."}, *HI])] * 4
    assert last == prompt_of(HI)


def test_options_reach_the_sampler(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {
            **BODY,
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 7,
            "metadata": {"user_id": "u" * 256},
            "service_tier": "auto",
            "context_management": {"edits": []},
        }
        assert (await client.post(MESSAGES, json=body)).status_code == 200

    dense = FakeDense(lambda submit: [EOS])
    with_client(tmp_path, dense, test)
    sampling = dense.submits[0].spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert dense.submits[0].spec.max_tokens == 50
