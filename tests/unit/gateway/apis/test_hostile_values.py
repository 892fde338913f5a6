"""Values that are valid JSON and hardly anything else, in every field of every body: none may be a 500."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.clients.gateway_calls import with_gateway
from tests.support.clients.http_clients import KeptConnection
from tests.support.examples import examples
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

HUGE = 10**4200  # JSON parsers take it; the product of two has more digits than Python writes (4,300)
VALUES: list[Any] = [HUGE, -HUGE, 2**64, "", {"": HUGE}, [], [[]], [[], []], [[[]]], [[HUGE]], [{}], [None]]
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer", "minimum": 1}}}
FORM = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2, "logit_bias": {"5": 1}, "response_format": FORM},
    "/v1/chat/completions": CHAT
    | {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}
    | {"response_format": FORM, "stream_options": {"include_usage": True}},
    "/v1/messages": CHAT
    | {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"}}
    | {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        "max_output_tokens": 16,
        "text": {"format": {"type": "json_schema", "name": "f", "schema": SCHEMA}},
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    },
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2}},
    "/completion": {"prompt": "a", "n_predict": 2, "json_schema": SCHEMA, "logit_bias": [[5, 1.0]]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [70]},
    "/apply-template": {"messages": MESSAGES},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
}
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}
COUNT = {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [2]}


def bodies_with(body: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """With each of the values; in `make test` with the first and four of the others, which depend on the name."""
    number, first = examples(len(VALUES), 5), zlib.crc32(name.encode())
    others = (VALUES[1 + (first + i) % (len(VALUES) - 1)] for i in range(number - 1))
    return (body | {name: value} for value in (VALUES[0], *others))


def mutations(value: Any) -> Iterator[Any]:
    """The value with one of the values above in the place of one of its parts, at any depth."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from bodies_with(value, name)
            yield from (value | {name: changed} for changed in mutations(part))
    elif isinstance(value, list) and value:
        yield from ([changed] for changed in mutations(value[0]))


def other_fields(document: dict[str, Any], path: str) -> list[str]:
    """The names of the fields that a route's body may have by the OpenAPI document, and the one above has not."""
    if path not in document["paths"]:
        return []
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = next(value["$ref"] for value in (schema, *schema.get("oneOf", ())) if "$ref" in value).rpartition("/")[2]
    properties = document["components"]["schemas"][name]["properties"]
    return [name for name in properties if name not in BODIES[path]]


async def assert_no_500(client: KeptConnection, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    status, answer = await client.post(path, content)
    assert 200 <= status < 500, (path, content[:300], answer[:300])


def with_client(tmp_path: Path, test: Any, **options: Any) -> None:
    async def body(gateway: RunningGateway) -> None:
        async with KeptConnection(gateway.http_address) as client:
            await test(client)

    with capture_logs() as logs:
        dense = FakeDense(lambda submit: [70] * submit.spec.max_tokens, max_model_len=64)
        with_gateway(tmp_path, dense, body, **options)
    assert [each for each in logs if each["log_level"] in ("error", "critical")] == []


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The OpenAPI document, which takes a gateway longer than a hundred requests."""
    found: dict[str, Any] = {}

    async def test(client: KeptConnection) -> None:
        found.update(await client.get("/openapi.json"))

    with_client(tmp_path_factory.mktemp("document"), test)
    return found


@pytest.mark.hypothesis  # so that `make chaos` tries all of them
@pytest.mark.parametrize("path", BODIES)
def test_hostile_values_are_no_500(tmp_path: Path, document: dict[str, Any], path: str) -> None:
    async def test(client: KeptConnection) -> None:
        assert path in document["paths"] or path == "/completion"
        await assert_no_500(client, path, BODIES[path])
        for body in mutations(BODIES[path]):
            await assert_no_500(client, path, body)
        for name in other_fields(document, path):
            for body in bodies_with(BODIES[path], name):
                await assert_no_500(client, path, body)

    with_client(tmp_path, test)


@pytest.mark.hypothesis
def test_hostile_values_of_text_generation_inference_are_no_500(tmp_path: Path) -> None:
    grammar = {"type": "json", "value": SCHEMA}
    parameters = {"max_new_tokens": 2, "temperature": 0.5, "top_k": 2, "truncate": 1, "stop": ["b"], "grammar": grammar}
    parameters |= {"top_n_tokens": 1, "seed": 1, "best_of": 1, "details": True, "decoder_input_details": True}

    async def test(client: KeptConnection) -> None:
        for body in mutations({"inputs": "a", "parameters": parameters}):
            await assert_no_500(client, "/generate", body)

    with_client(tmp_path, test)


@pytest.mark.hypothesis
def test_hostile_tensors_are_no_500(tmp_path: Path) -> None:
    async def test(client: KeptConnection) -> None:
        root = {"inputs": [TENSOR, COUNT]}
        for model in ("ensemble", "tensorrt_llm", "preprocessing", "postprocessing"):
            [inputs] = [(await client.get(f"/v2/models/{model}"))["inputs"]]
            for each in inputs[:: 1 if model == "tensorrt_llm" else 4]:
                asked = {"text_input": "a", "max_tokens": 2, "input_ids": [70], "input_lengths": 1}
                asked |= {"request_output_len": 2, "QUERY": "a", "REQUEST_OUTPUT_LEN": 2, "TOKENS_BATCH": [[70]]}
                for body in bodies_with(asked, each["name"]):
                    await assert_no_500(client, f"/v2/models/{model}/generate", body)
                tensor = {"name": each["name"], "datatype": each["datatype"], "shape": [1, 1], "data": [1]}
                for name in ("shape", "data"):
                    for body in bodies_with(tensor, name):
                        await assert_no_500(
                            client, f"/v2/models/{model}/infer", {"inputs": [TENSOR, COUNT, body]}
                        )
        for name in ("id", "inputs", "outputs", "parameters"):
            for body in bodies_with(root, name):
                await assert_no_500(client, "/v2/models/ensemble/infer", body)
        for name in (*TENSOR, "parameters"):
            for body in bodies_with(TENSOR, name):
                await assert_no_500(client, "/v2/models/ensemble/infer", {"inputs": [body, COUNT]})
        sizes = (HUGE, 2**63, 2**62, 0, 1, -1)
        for num_dims in (1, 2, 3):
            for shape in itertools.product(sizes, repeat=num_dims):
                body = TENSOR | {"shape": list(shape)}
                await assert_no_500(client, "/v2/models/ensemble/infer", {"inputs": [body, COUNT]})
                body = COUNT | {"shape": list(shape)}
                await assert_no_500(client, "/v2/models/ensemble/infer", {"inputs": [TENSOR, body]})
        for name in ("binary_data_size", "shared_memory_region"):
            for parameters in bodies_with({}, name):
                body = TENSOR | {"parameters": parameters}
                await assert_no_500(client, "/v2/models/ensemble/infer", {"inputs": [body, COUNT]})

    with_client(tmp_path, test, enable_prompt_embeds=True)
