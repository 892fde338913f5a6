"""A transcription whose requests end otherwise than by themselves, and models whose files do not allow any."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path

import httpx2
import pytest
from transformers import WhisperFeatureExtractor, WhisperProcessor

from services.common.child_options import ChildOptions
from services.common.config import Config, GatewaySection, ModelSection
from services.common.errors import ModelError
from services.gateway.service import Gateway
from services.pb import dense_pb2, gateway_pb2
from tests.support.clients.http_gateway import check_error, with_client
from tests.support.running_gateway import RunningGateway, run, until
from tests.support.speech import (
    END,
    ENGLISH,
    FIRST_TIMESTAMP,
    PIECES,
    VOCAB_SIZE,
    byte_tokenizer,
    make_speech_model,
    sound_file,
    sound_of,
)
from tests.support.workers.fake_dense import FakeDense

# Tokens of each request of a file, of which the last one does not end by itself, and the fields of its form.
FILES = {
    "language": ([[]], {}),
    "window": ([[ENGLISH], []], {}),
    "part-of-a-window": ([[ENGLISH], [FIRST_TIMESTAMP, 1, 2]], {"temperature": "0"}),
    "stream": ([[]], {"language": "en", "stream": "true"}),
}


def test_an_abort_of_any_part_ends_the_file_as_an_aborted_request(tmp_path: Path) -> None:
    def script(submit: dense_pb2.Submit) -> Sequence[int]:
        name, number = submit.spec.request_id.rsplit("-", 1)
        return FILES[name][0][int(number) - 1]

    dense = FakeDense(script, vocab_size=VOCAB_SIZE, max_model_len=64)

    def is_waiting() -> bool:
        return any(each.num_output_tokens == len(each.token_ids) for each in dense.running.values())

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        sound = ("speech.wav", sound_file(sound_of(0.5)))
        for name, (tokens, fields) in FILES.items():
            post = client.post(
                "/v1/audio/transcriptions", files={"file": sound}, data=fields, headers={"x-request-id": name}
            )
            answer = asyncio.create_task(post)
            last = f"{name}-{len(tokens)}"
            await until(is_waiting)
            assert (await gateway.stub.Abort(gateway_pb2.AbortRequest(request_id=last))).was_running
            check_error(response := await answer, 499, None, f"{last} was aborted")
            assert response.json()["error"]["code"] == "aborted_by_caller"
            await until(lambda: not dense.running)

    with_client(tmp_path, dense, test, model=make_speech_model(tmp_path))


def test_an_object_of_json_is_a_form(tmp_path: Path) -> None:
    """With the file in base64, as clients of llama.cpp send it."""
    tokens = [FIRST_TIMESTAMP, 1, 2, FIRST_TIMESTAMP + 5, END]
    dense = FakeDense(lambda submit: tokens[: submit.spec.max_tokens], vocab_size=VOCAB_SIZE, max_model_len=64)
    url, file = "/v1/audio/transcriptions", sound_file(sound_of(0.5))

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        fields = {"language": "en", "response_format": "vtt", "temperature": "0", "top_k": "3"}
        form = await client.post(url, files={"file": ("speech.wav", file)}, data=fields)
        body = {"file": base64.b64encode(file).decode(), "format": "wav", "prompt": None, "stream": False}
        body |= {**fields, "temperature": 0.0, "top_k": 3, "timestamp_granularities": ["segment"]}
        answer = await client.post(url, json=body)
        assert answer.status_code == 200 and answer.text == form.text and "-->" in answer.text
        options = [submit.spec.sampling.top_k for submit in dense.submits]
        assert options and set(options) == {3}
        for wrong, param, what in (
            ({}, "file", "file is missing"),
            ({"file": "="}, "file", "not base64"),
            ({"file": ["a"]}, "file", "base64"),
            ({"file": ""}, "file", "empty"),
            (body | {"language": {"a": 1}}, "language", "must be a text"),
            (body | {"temperature": 2}, "temperature", "'2', must be a number from 0 to 1"),
            ([], None, "no object"),
        ):
            check_error(await client.post(url, json=wrong), 400, param, what)
        broken = await client.post(url, content=b'{"file":', headers={"content-type": "application/json"})
        check_error(broken, 400, None, "not JSON")
        check_error(await client.post(url, content=b"a", headers={"content-type": "text/plain"}), 415, None)

    with_client(tmp_path, dense, test, model=make_speech_model(tmp_path))


def test_a_gateway_starts_with_either_form_of_a_feature_extractor(tmp_path: Path) -> None:
    model = make_speech_model(tmp_path)
    extractor = WhisperFeatureExtractor.from_pretrained(model)
    (model / "preprocessor_config.json").unlink()

    async def start() -> None:
        gateway = Gateway(
            Config(
                gateway=GatewaySection(address=f"unix:{tmp_path}/grpc.sock", http_address=f"unix:{tmp_path}/http.sock"),
                model=ModelSection(path=model),
            ),
            asyncio.Event(),
            ChildOptions(),
        )
        try:
            await gateway.start()
        finally:
            await gateway.stop()

    with pytest.raises(ModelError, match=r"neither preprocessor_config\.json nor processor_config\.json with"):
        run(start())
    WhisperProcessor(extractor, byte_tokenizer(PIECES)).save_pretrained(model)
    assert not (model / "preprocessor_config.json").exists()
    run(start())
