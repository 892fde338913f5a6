"""Well-known clients of OpenAI's, Anthropic's and Ollama's APIs, as users install them, against a real cluster.

Each program in `programs/` uses one client, in an environment that `make clients` installs, and prints what it
received. Text, pieces and counts must equal those that gRPC gives for the same prompt; errors have the client's names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.clients.environments import NODE, Environment
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, free_port, running_cluster

MODEL = EMBEDDED_MODEL.name
PROMPT = "San Francisco is a"
QUESTION = "What is the capital of France?"
MAX_TOKENS = 32  # the chat ends earlier by itself, the completion does not
TOO_LONG = "San Francisco is a " * 1000  # the context has 2048 tokens
PROGRAMS = Path(__file__).with_name("programs")
PROGRAM_TIMEOUT_S = 100.0
CODE = "context_length_exceeded"
MAX_ROUNDS = 5  # until no stream comes in one piece, as it may on a busy machine
# Clients must not ask other servers, for example for the prices of models. Two streams need only one process.
SETTINGS = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}


@dataclass(frozen=True)
class Program:
    """A client program: its group, the keys that it prints, and its name for the error of a too long prompt."""

    file: str
    group: str
    shows: frozenset[str]
    overflow: str | None = None


COMPLETIONS = {"completion", "completion_usage"}
CHAT = {"chat", "chat_pieces", "chat_usage"}
RESPONSE = {"response", "response_pieces", "response_usage"}
CLIENTS = [
    Program(
        "with_openai.py",
        "agents",
        frozenset(COMPLETIONS | CHAT | RESPONSE | {"completion_pieces", "models", "several", "from_logprobs"}),
        CODE,
    ),
    Program("with_anthropic.py", "anthropic", frozenset(CHAT | {"count", "models"}), "invalid_request_error"),
    Program("with_litellm.py", "litellm", frozenset(COMPLETIONS | CHAT), "ContextWindowExceededError"),
    Program(
        "with_langchain.py",
        "agents",
        frozenset(COMPLETIONS | CHAT | {"completion_pieces", "several"}),
        "ContextOverflowError",
    ),
    Program("with_pydantic_ai.py", "agents", frozenset(CHAT), CODE),
    Program("with_autogen.py", "agents", frozenset(CHAT | {"several", "speakers"})),
    Program(
        "with_ollama.py",
        "ollama",
        frozenset(COMPLETIONS | CHAT | {"completion_pieces", "models", "several"}),
        "400",
    ),
    Program("with_cohere.py", "vectors", frozenset(CHAT | {"models"}), "BadRequestError"),
    Program("with_mistral.py", "mistral", frozenset(CHAT | {"models", "called"}), CODE),
    Program("with_openai.mjs", NODE, frozenset(COMPLETIONS | CHAT | {"completion_pieces", "models"}), CODE),
    Program("with_ai.mjs", NODE, frozenset(CHAT), CODE),
]


@dataclass(frozen=True)
class Truth:
    """The answer over gRPC."""

    text: str
    usage: list[int]  # numbers of tokens of prompt and answer


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    address = f"gateway.http_address=127.0.0.1:{free_port()}"
    with running_cluster(tmp_path_factory.mktemp("clients"), address) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.wait_idle()


@pytest.fixture(scope="module")
def completion(cluster: Cluster) -> Truth:
    return truth(cluster, gateway_pb2.GenerateRequest(prompt=PROMPT))


@pytest.fixture(scope="module")
def chat(cluster: Cluster) -> Truth:
    message = {"role": "user", "content": QUESTION}
    return truth(cluster, gateway_pb2.GenerateRequest(chat={"messages": [message]}))


def truth(cluster: Cluster, request: gateway_pb2.GenerateRequest) -> Truth:
    request.max_tokens = MAX_TOKENS
    request.sampling.temperature = 0
    [answer] = cluster.gateway.Generate(request, timeout=REQUEST_TIMEOUT_S).completions
    usage = answer.finish.usage
    return Truth(answer.text, [usage.num_prompt_tokens, usage.num_output_tokens])


def needs(group: str) -> pytest.MarkDecorator:
    """Skips the test if the group is not installed."""
    reason = f"the clients {group} are not installed: `make clients`"
    return pytest.mark.skipif(not Environment(group).is_installed, reason=reason)


def run_program(program: Program, cluster: Cluster) -> dict[str, Any]:
    """The values that the program prints."""
    home = Environment(program.group)
    file = PROGRAMS / program.file
    if program.group == NODE:
        shutil.copy(file, home.directory)  # node looks for packages in the program's directory
        command = ["node", str(home.directory / program.file)]
    else:
        command = [home.program("python"), str(file)]
    limits = [MODEL, PROMPT, QUESTION, str(MAX_TOKENS), TOO_LONG]
    return json.loads(run([*command, f"http://{cluster.http_address}/v1", *limits]).splitlines()[-1])


def pieces_of(got: dict[str, Any], key: str) -> list[str]:
    return [piece for piece in got[key] if piece]


def run(command: Sequence[str], directory: Path | None = None) -> str:
    """The standard output of a client, which must end without an error."""
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, cwd=directory, env=os.environ | SETTINGS
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.parametrize("program", [pytest.param(each, id=each.file, marks=needs(each.group)) for each in CLIENTS])
def test_a_client_gets_the_answers_of_grpc(program: Program, cluster: Cluster, completion: Truth, chat: Truth) -> None:
    for _ in range(MAX_ROUNDS):
        got = run_program(program, cluster)
        if all(len(pieces_of(got, key)) > 1 for key in got if key.endswith("_pieces")):
            break
    assert got.pop("overflow", None) == program.overflow
    assert got.keys() == program.shows
    for key, expected in (("completion", completion), ("chat", chat), ("response", chat)):
        assert got.get(key, expected.text) == expected.text
        assert got.get(f"{key}_usage", expected.usage) == expected.usage
        if f"{key}_pieces" in got:
            pieces = pieces_of(got, f"{key}_pieces")
            assert "".join(pieces) == expected.text
            assert len(pieces) > 1, "the answer was not streamed"
    assert set(got.get("several", [chat.text])) == {chat.text}
    assert got.get("from_logprobs", chat.text).removesuffix("</s>") == chat.text, "the tokens differ from the text"
    assert got.get("models", [MODEL]) == [MODEL]
    assert got.get("count", chat.usage[0]) == chat.usage[0]
    assert got.get("called", ["get_weather"]) == ["get_weather"]
    assert got.get("speakers", ["user", "first", "second"]) == ["user", "first", "second"]


@needs("guidellm")
def test_guidellm_gets_every_answer(cluster: Cluster, tmp_path: Path) -> None:
    """guidellm sends a load of its own: streams with counts of usage in every chunk."""
    num_requests, num_tokens = 8, 16
    report = tmp_path / "report.json"
    command = [
        Environment("guidellm").program("guidellm"),
        "run",
        "--backend",
        f"kind=openai_http,target=http://{cluster.http_address},model={MODEL}",
        "--profile",
        "kind=concurrent,streams=2",
        "--constraint",
        f"kind=max_requests,count={num_requests}",
        "--data",
        f"kind=synthetic_text,prompt_tokens=32,output_tokens={num_tokens}",
        "--tokenizer",
        f"kind=huggingface_auto,model={EMBEDDED_MODEL}",
        "--output",
        f"kind=json,path={report}",
        "--disable-console",
    ]
    run(command, tmp_path)
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (num_requests, 0), totals
    assert {each["output_tokens"] for each in benchmark["requests"]["successful"]} == {num_tokens}
