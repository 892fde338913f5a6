"""vLLM's /v1/messages/render: what it gives asks /inference/v1/generate for the message's own answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.clients.gateway_calls import ids
from tests.support.clients.http_gateway import MODEL, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense
from tests.unit.gateway.apis.anthropic.test_messages import BODY, HI, MESSAGES

GENERATE = "/inference/v1/generate"
TALK = [*HI, {"role": "assistant", "content": "Why?"}, {"role": "user", "content": [{"type": "text", "text": "So."}]}]
FORM = {"type": "json_schema", "schema": {"type": "object", "properties": {}}}
ASKED: list[dict[str, Any]] = [
    {},
    {"messages": TALK, "system": "Be brief.", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["x"]},
    {"messages": TALK[:2], "output_config": {"format": FORM}},
]


@pytest.mark.parametrize("asked", ASKED)
def test_what_is_rendered_asks_for_the_same_answer(tmp_path: Path, asked: dict[str, Any]) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = BODY | asked
        response = await client.post(f"{MESSAGES}/render", json=body)
        assert response.status_code == 200, response.text
        assert not dense.submits, "nothing is generated"
        rendered = response.json()
        assert rendered["request_id"].startswith("msg_") and rendered["model"] == MODEL
        for url, sent in ((MESSAGES, body), (GENERATE, rendered)):
            response = await client.post(url, json=sent)
            assert response.status_code == 200, response.text
        first, second = dense.submits
        for each in (first, second):
            for name in ("seq_id", "group_id", "queue_timeout_ms"):
                each.ClearField(name)
            each.spec.ClearField("request_id")
            each.spec.sampling.ClearField("seed")
            each.spec.sampling.structured_output.ClearField("field_name")  # the one to blame
        assert first == second

    dense = FakeDense(lambda submit: ids("a") * submit.spec.max_tokens, max_model_len=128)
    with_client(tmp_path, dense, test)


def test_what_token_ids_alone_do_not_ask_for_is_refused(tmp_path: Path) -> None:
    tool = {"name": "look", "input_schema": {"type": "object", "properties": {}}}

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for options, status, words in (
            ({"tools": [tool], "tool_choice": {"type": "any"}}, 400, "tool_choice: this field is not supported"),
            ({"model": "none"}, 404, "none"),
        ):
            response = await client.post(f"{MESSAGES}/render", json=BODY | options)
            error = response.json()
            assert (response.status_code, error["type"]) == (status, "error")
            assert words in error["error"]["message"], error

    with_client(tmp_path, FakeDense(lambda submit: []), test)
