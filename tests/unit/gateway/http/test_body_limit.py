"""How large a body may be: what is refused names the setting, and photos fit if the model sees pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.clients.http_gateway import CHATS, COMPLETIONS, check_error, with_client
from tests.support.dense.vision_models import noise
from tests.support.running_gateway import RunningGateway
from tests.support.served_vision import make_served_vision_model
from tests.support.workers.fake_dense import FakeDense


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def photo() -> dict[str, Any]:
    """A chat with a picture of 3 MB, as a phone makes them."""
    buffer = io.BytesIO()
    noise(1000, 1100, 1).save(buffer, "PNG", compress_level=0)
    assert len(buffer.getvalue()) > 3_000_000
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Hi"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def test_a_photo_fits_if_the_model_sees_pictures(tmp_path: Path, model: Path, photo: dict[str, Any]) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = await client.post(CHATS, json=photo)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] > 10
        check_error(await client.post(CHATS, content=bytes(2**24 + 1)), 413, None, "16777216 (gateway.max_body_bytes)")

    with_client(tmp_path, FakeDense(lambda submit: [5]), test, model=model)


def test_others_have_2_mib_unless_they_are_configured(tmp_path: Path, photo: dict[str, Any]) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        check_error(await client.post(CHATS, json=photo), 413, None, "the limit is 2097152 (gateway.max_body_bytes)")

        async def pieces() -> AsyncIterator[bytes]:
            yield bytes(2**20)
            yield bytes(2**20)
            yield b"x"

        headers = {"content-type": "application/json"}
        refused = await client.post(CHATS, content=pieces(), headers=headers)
        check_error(refused, 413, None, "more than 2097152 bytes", "(gateway.max_body_bytes)")
        upload = {"file": ("a.wav", bytes(2**21 + 2**16), "audio/wav")}
        refused = await client.post("/v1/audio/transcriptions", files=upload)
        check_error(refused, 413, None, "(gateway.max_audio_bytes)")

    with_client(tmp_path, FakeDense(lambda submit: [5]), test, max_audio_bytes=2**21)


def test_what_is_configured_holds_for_every_model(tmp_path: Path, model: Path, photo: dict[str, Any]) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        check_error(await client.post(CHATS, json=photo), 413, None, "the limit is 4000000 (gateway.max_body_bytes)")

    with_client(tmp_path, FakeDense(lambda submit: [5]), test, model=model, max_body_bytes=4_000_000)


def test_text_has_no_more_room_than_without_pictures(tmp_path: Path, model: Path) -> None:
    text = "a" * (2**21 + 1)
    chat = {"messages": [{"role": "user", "content": text}]}
    bodies = [
        (CHATS, chat, "messages"),
        (COMPLETIONS, {"prompt": text}, "prompt"),
        (COMPLETIONS, {"prompt": text[1:], "suffix": "a"}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "decoder_prompt": text}, "decoder_prompt"),
        ("/tokenize", {"prompt": text}, "prompt"),
        ("/tokenize", chat, "messages"),
    ]
    dense = FakeDense(lambda submit: [5], max_model_len=2**20)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for path, body, field in bodies:
            words = (f"{field} has 2097153 characters", "at most 2097152")
            check_error(await client.post(path, json=body), 400, field, *words)
        answer = await client.post("/completion", json={"prompt": [1, text]})
        assert answer.status_code == 400 and "prompt has 2097153 characters" in answer.json()["error"]["message"]

    async def test_vectors(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = await client.post("/v1/embeddings", json={"input": text, "truncate_prompt_tokens": 4})
        check_error(answer, 400, "input", "input has 2097153 characters", "at most 2097152")

    with_client(tmp_path, dense, test, model=model)
    with_client(tmp_path, dense, test_vectors, model=model, runner="pooling")


def test_text_has_an_eighth_of_larger_bodies(tmp_path: Path, model: Path) -> None:
    dense = FakeDense(lambda submit: [5], max_model_len=2**23)
    num_characters = 2**21 + 2**17

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = await client.post("/tokenize", json={"prompt": "a " * (num_characters // 2)})
        assert answer.status_code == 200, answer.text
        assert answer.json()["count"] > num_characters // 4
        answer = await client.post("/tokenize", json={"prompt": "a" * (num_characters + 1)})
        words = (f"prompt has {num_characters + 1} characters", f"at most {num_characters}", "gateway.max_body_bytes")
        check_error(answer, 400, "prompt", *words)

    with_client(tmp_path, dense, test, model=model, max_body_bytes=8 * num_characters)
