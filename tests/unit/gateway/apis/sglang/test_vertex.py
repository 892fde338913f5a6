"""/vertex_generate gives what /generate gives, in the form of Google's Vertex AI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
from structlog.testing import capture_logs

from services.gateway.apis.sglang.vertex_routes import VertexBody
from tests.support.clients.gateway_calls import EOS, ids
from tests.support.clients.http_clients import events
from tests.support.clients.http_gateway import check_error, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

URL = "/vertex_generate"
CHANGING = ("id", "e2e_latency")


def without_changing(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        each | {"meta_info": {name: value for name, value in each["meta_info"].items() if name not in CHANGING}}
        for each in answers
    ]


def test_instances_are_the_prompts_and_parameters_the_other_fields(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for kind, prompts in (("text", ["a city", "b"]), ("input_ids", [[5, 6], [7]]), ("text", ["a city"])):
            for parameters in (None, {}, {"sampling_params": {"max_new_tokens": 1}, "return_logprob": True}):
                same = (await client.post("/generate", json={kind: prompts} | (parameters or {}))).json()
                body = {"instances": [{kind: each} for each in prompts], "parameters": parameters}
                found = (await client.post(URL, json=body)).json()
                assert found.keys() == {"predictions"}
                assert without_changing(found["predictions"]) == without_changing(same)
        stream = {"instances": [{"text": "a city"}], "parameters": {"stream": True}}
        assert events((await client.post(URL, json=stream)).text)[-1]["output_ids"] == [*ids(" one two"), EOS]

    with_client(tmp_path, FakeDense(lambda submit: [*ids(" one two"), EOS][: submit.spec.max_tokens]), test)


def test_null_means_the_default_and_unknown_fields_are_logged(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"instances": [{"text": "a", "input_ids": None}], "parameters": {"text": None, "within": 1}}
        with capture_logs() as logs:
            response = await client.post(URL, json=body | {"stream": None, "beyond": 1})
        assert response.status_code == 200, response.text
        assert [each["fields"] for each in logs if each.get("num_fields")] == ["beyond,within"]

    with_client(tmp_path, FakeDense(lambda submit: [EOS]), test)


def test_the_document_has_its_fields() -> None:
    schema = VertexBody.model_json_schema()
    assert schema["properties"].keys() == {"instances", "parameters"} and schema["required"] == ["instances"]
    fields = schema["properties"]["parameters"]["properties"]
    assert {"sampling_params", "stream", "rid"} <= fields.keys() and not {"text", "input_ids"} & fields.keys()


def test_what_is_wrong_is_said_by_name(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for body, field in (
            ({}, "instances"),
            ({"instances": []}, "instances"),
            ({"instances": ["a"]}, "instances"),
            ({"instances": [{"prompt": "a"}]}, "instances"),
            ({"instances": [{"text": "a"}, {"input_ids": [5]}]}, "instances"),
            ({"instances": [{"text": "a", "image_data": "x"}]}, "instances"),
            ({"instances": [{"text": "a"}], "parameters": []}, "parameters"),
            ({"instances": [{"text": "a"}], "parameters": {"sampling_params": {"n": "x"}}}, "sampling_params.n"),
            ({"instances": [{"text": "a"}], "parameters": {"image_data": ["x"]}}, "image_data"),
            ({"instances": [{"text": "a"}, {"text": 5}]}, "text"),
            ({"instances": [{"input_ids": 5}, {"input_ids": 6}]}, "instances"),
            ({"instances": [{"input_ids": [5]}, {"input_ids": "a"}]}, "instances"),
            ({"instances": [{"text": "a"}], "stream": True}, "stream"),
            ({"instances": [{"text": "a"}], "sampling_params": {}}, "sampling_params"),
            ({"instances": [{"text": "a"}], "text": "b"}, "text"),
            ({"instances": [{"text": "a"}], "image_data": ["b"]}, "image_data"),
            ({"instances": [{"text": "a"}], "parameters": {"text": "b"}}, "parameters"),
            ({"instances": [{"text": "a"}], "parameters": {"input_ids": [5]}}, "parameters"),
        ):
            check_error(await client.post(URL, json=body), 400, field)

    with_client(tmp_path, FakeDense(lambda submit: [EOS]), test)
