"""Calls of tools as installed clients read them, whole and streamed, from a real cluster.

The embedded model was not taught the format: a grammar makes it call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from services.common.config import EMBEDDED_MODEL
from tests.clients.environments import Environment
from tests.clients.test_clients import needs, run
from tests.support.cluster import Cluster, free_port, running_cluster

QUESTION = "How is the weather in Paris?"
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
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": SCHEMA}}
PROGRAMS = [
    ("tools_with_openai.py", "agents"),
    ("tools_with_langchain.py", "agents"),
    ("tools_with_litellm.py", "litellm"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = (f"gateway.http_address=127.0.0.1:{free_port()}", "gateway.tool_parser=hermes")
    with running_cluster(tmp_path_factory.mktemp("tools"), *settings) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("file", "group"), [pytest.param(file, group, id=file, marks=needs(group)) for file, group in PROGRAMS]
)
def test_a_client_reads_the_same_call_whole_and_streamed(file: str, group: str, cluster: Cluster) -> None:
    program = Path(__file__).with_name("programs") / file
    command = [Environment(group).program("python"), str(program), f"http://{cluster.http_address}/v1"]
    got = json.loads(run([*command, EMBEDDED_MODEL.name, QUESTION, json.dumps(TOOL)]).splitlines()[-1])
    [(name, arguments), streamed] = got["calls"]
    assert name == "get_weather" and streamed == [name, arguments]
    jsonschema.validate(arguments, SCHEMA)
    assert got["reasons"] == ["tool_calls", "tool_calls"]
