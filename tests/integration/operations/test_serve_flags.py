"""A server that is started as users of vLLM would start it: model, port, names, key and template by flags."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from tests.support.cluster import REQUEST_TIMEOUT_S, STOP_TIMEOUT_S, free_port, wait_for_log
from tests.support.warm_process import WarmProcess, run_warm, warm_server

KEYS = ("a-key-of-sixteen-characters", "another-key-of-sixteen-characters")
TEMPLATE = "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("serve")
    template, log_file = directory / "template.jinja", directory / "log"
    template.write_text(TEMPLATE)
    port = free_port()
    command = [sys.executable, "-m", "services.launch", str(EMBEDDED_MODEL)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--set", f"gateway.address=unix:{directory}/grpc.sock"]
    command += ["--served-model-name", "first", "second", "--api-key", *KEYS, "--chat-template", str(template)]
    command += ["--max-model-len", "64", "--max-num-seqs", "4", "--reasoning-parser", "none"]
    with log_file.open("w") as log:
        server = WarmProcess(warm_server(), command, stderr=log.fileno())
    try:
        wait_for_log(server, log_file, "Serving ")
        yield f"http://127.0.0.1:{port}"
        server.send_signal(signal.SIGINT)
        assert server.wait(STOP_TIMEOUT_S) == 0, log_file.read_text()
    finally:
        if server.poll() is None:
            server.kill()
            server.wait(STOP_TIMEOUT_S)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_may_use_the_names(base_url: str, key: str) -> None:
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=key, timeout=REQUEST_TIMEOUT_S)
    models = client.models.list().data
    assert [model.id for model in models] == ["first", "second"]
    assert models[0].model_extra is not None and models[0].model_extra["max_model_len"] == 64
    answer = client.completions.create(model="second", prompt="San Francisco is a", max_tokens=7, temperature=0)
    assert answer.choices[0].text == " city in Northern California that is known"


def test_others_may_not(base_url: str) -> None:
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="a-key-that-nobody-has-given", timeout=REQUEST_TIMEOUT_S)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_the_template_of_the_flag_renders_chats(base_url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Who are you?"}]}
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    reply = httpx2.post(f"{base_url}/tokenize", json=body, headers=headers, timeout=REQUEST_TIMEOUT_S)
    expected = AutoTokenizer.from_pretrained(EMBEDDED_MODEL).encode("<user> Who are you?\n", add_special_tokens=False)
    assert reply.json()["tokens"] == expected


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff"])
def test_a_template_that_cannot_be_read_ends_the_start_with_its_name(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    ended = failed_start("--chat-template", str(file))
    assert f"gateway.chat_template '{file}' " in ended.stderr


def test_a_key_that_is_too_short_ends_the_start_without_being_quoted() -> None:
    ended = failed_start("--api-key", "short-key")
    assert "at least 16" in ended.stderr and "short-key" not in ended.stderr
    assert "service=gateway" not in ended.stderr, "a service was started for it"


def failed_start(*arguments: str) -> subprocess.CompletedProcess[str]:
    ended = run_warm("services.launch", "--prompt", "a", *arguments)
    assert ended.returncode == 1, ended.stderr
    return ended
