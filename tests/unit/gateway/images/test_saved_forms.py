"""Directories of models that see pictures in the forms that transformers saves, behind a whole gateway."""

from __future__ import annotations

from pathlib import Path

import httpx2
from structlog.testing import capture_logs

from tests.support.clients.gateway_calls import ids
from tests.support.clients.http_gateway import CHATS, check_error, with_client
from tests.support.dense.vision_models import noise
from tests.support.running_gateway import RunningGateway
from tests.support.served_vision import data_url, make_served_vision_model
from tests.support.workers.fake_dense import FakeDense

PICTURE = {"type": "image_url", "image_url": {"url": data_url(noise(30, 43, 1))}}
TEXT = {"type": "text", "text": "What is it?"}
FILES = ("preprocessor_config.json", "processor_config.json")


def test_what_a_directory_lacks_is_logged_and_named_in_the_refusal(tmp_path: Path) -> None:
    path = make_served_vision_model(tmp_path / "model", "llava")
    (path / "preprocessor_config.json").unlink()

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = await client.post(CHATS, json={"messages": [{"role": "user", "content": [TEXT, PICTURE]}]})
        check_error(answer, 400, "messages", "sees no pictures", *FILES)
        text = await client.post(CHATS, json={"messages": [{"role": "user", "content": [TEXT]}], "max_tokens": 1})
        assert text.status_code == 200, text.text

    with capture_logs() as logs:
        with_client(tmp_path, FakeDense(lambda submit: ids(" a")), test, model=path)
    [reason] = [each["reason"] for each in logs if each["event"] == "the text part of the model is served alone"]
    assert all([name in reason for name in FILES])
