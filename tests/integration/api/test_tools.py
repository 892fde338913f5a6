"""Demanded calls from a real model that was never taught to call tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.clients.http_clients import client
from tests.support.cluster import Cluster, running_cluster
from tests.support.models import TWO_LAYERS

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 20},
    },
    "required": ["city", "days", "note"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}]
GIVEN: Any = {
    "model": "tiny-llama",
    "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
    "tools": TOOLS,
    "max_tokens": 400,
    "parallel_tool_calls": False,  # this model would write calls without end
}


@pytest.fixture(scope="module", params=["hermes", "mistral", "pythonic", "llama3_json"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("tools")
    with running_cluster(directory, TWO_LAYERS, f"gateway.tool_parser={request.param}", is_warm=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with client(cluster.http_address) as transport:
        yield openai.OpenAI(api_key="none", base_url="http://gateway/v1", http_client=transport, max_retries=0)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_whatever_the_model_wants_it_writes_a_valid_call(api: openai.OpenAI, choice: Any) -> None:
    def check(seed: int) -> None:
        options: Any = {"tool_choice": choice, "seed": seed, "temperature": 1.5}
        whole = api.chat.completions.create(**GIVEN, **options)
        [call] = whole.choices[0].message.tool_calls[:1]
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        assert not whole.choices[0].message.content
        with api.chat.completions.stream(**GIVEN, **options) as stream:
            streamed = stream.get_final_completion().choices[0].message
        assert [each.function.arguments for each in streamed.tool_calls] == [
            each.function.arguments for each in whole.choices[0].message.tool_calls
        ]

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(check, range(2)))
