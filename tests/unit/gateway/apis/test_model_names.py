"""A model with several names, or with any name: which names are listed and accepted, and the name in an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.support.clients.http_clients import async_client, events
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.workers.fake_dense import FakeDense

NAMES = ("gpt-tiny", "org/tiny")
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 1},
    CHATS: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


def with_gateway(
    tmp_path: Path, test: Callable[[httpx2.AsyncClient, RunningGateway], Awaitable[None]], **options: Any
) -> None:
    """Runs `test` against a serving gateway."""

    async def body() -> None:
        dense = FakeDense(lambda submit: [70])
        async with running_gateway(tmp_path, dense, **options) as gateway, async_client(gateway.http_address) as client:
            await test(client, gateway)

    run(body())


async def names_in_answers(client: httpx2.AsyncClient, path: str, model: str | None) -> set[str]:
    """The names of the model in a whole answer and in all chunks of a streamed one."""
    body = BODIES[path] | {"model": model}
    whole = await client.post(path, json=body)
    assert whole.status_code == 200, whole.text
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events((await client.post(path, json=body | options)).text)
    return {whole.json()["model"], *(chunk["model"] for chunk in chunks)}


def test_every_name_is_listed_and_accepted_and_appears_in_the_answer(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        api = openai.AsyncOpenAI(api_key="none needed", base_url="http://gateway/v1", http_client=client, max_retries=0)
        models = (await api.models.list()).data
        assert tuple(model.id for model in models) == NAMES
        assert {model.model_extra["root"] for model in models} == {str(EMBEDDED_MODEL)}
        for name in NAMES:
            assert (await api.models.retrieve(name)).id == name
            for path in (COMPLETIONS, CHATS):
                assert await names_in_answers(client, path, name) == {name}
            for path in ("/tokenize", "/detokenize"):
                assert (await client.post(path, json=BODIES[path] | {"model": name})).status_code == 200
        for path in (COMPLETIONS, CHATS):
            for nothing in (None, ""):
                assert await names_in_answers(client, path, nothing) == {NAMES[0]}
        for path, body in BODIES.items():
            response = await client.post(path, json=body | {"model": EMBEDDED_MODEL.name})
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.get("/stats")).json()["model"] == NAMES[0]
        info = await gateway.stub.ModelInfo(gateway_pb2.ModelInfoRequest())
        assert (info.model, tuple(info.names)) == (NAMES[0], NAMES)
        message = gateway_pb2.GenerateRequest(prompt="a", max_tokens=1, model=NAMES[1])
        assert (await gateway.stub.Generate(message)).completions[0].token_ids == [70]
        message.model = EMBEDDED_MODEL.name
        with pytest.raises(grpc.aio.AioRpcError, match="not served here") as unknown:
            await gateway.stub.Generate(message)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

    with_gateway(tmp_path, test, served_model_names=(*NAMES, NAMES[0]))


def test_any_name_is_accepted_if_configured(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path in (COMPLETIONS, CHATS):
            assert await names_in_answers(client, path, "gpt-5") == {"gpt-5"}
            assert await names_in_answers(client, path, None) == {EMBEDDED_MODEL.name}
        assert (await client.get("/v1/models/gpt-5")).json()["id"] == "gpt-5"
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == [EMBEDDED_MODEL.name]
        assert [(each["model"], each["capabilities"]) for each in listed["models"]] == [
            (EMBEDDED_MODEL.name, ["completion"])
        ]
        message = gateway_pb2.GenerateRequest(prompt="a", max_tokens=1, model="gpt-5")
        assert (await gateway.stub.Generate(message)).completions[0].token_ids == [70]

    with_gateway(tmp_path, test, accept_any_model_name=True)


def test_the_names_that_hugging_face_clients_send_mean_the_model(tmp_path: Path) -> None:
    """`InferenceClient(URL).chat_completion(...)` sends "dummy", examples for Text Generation Inference "tgi"."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for name in ("dummy", "tgi"):
            assert await names_in_answers(client, CHATS, name) == {name}
        other = await client.post(CHATS, json=BODIES[CHATS] | {"model": "other"})
        assert other.status_code == 404
        assert "The model `other` does not exist" in other.json()["error"]["message"]

    with_gateway(tmp_path, test)


def test_models_are_described_as_mistrals_client_needs_it(tmp_path: Path) -> None:
    """It raises an error for a model without `type` and `capabilities`."""

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        [listed] = (await client.get("/v1/models")).json()["data"]
        one = (await client.get(f"/v1/models/{EMBEDDED_MODEL.name}")).json()
        assert listed == one and one["type"] == "base"
        assert one["capabilities"] == {
            "completion_chat": True, "completion_fim": False, "function_calling": True, "vision": False,
        }

    with_gateway(tmp_path, test)


@pytest.mark.parametrize("accepts_any", [False, True])
def test_a_very_long_name_is_refused_and_not_repeated(accepts_any: bool, tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, body in BODIES.items():
            response = await client.post(path, json=body | {"model": "x" * 1_000_000})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "model"
            assert "1000000 characters, at most 256" in response.json()["error"]["message"]
            assert len(response.text) < 500

    with_gateway(tmp_path, test, accept_any_model_name=accepts_any)
