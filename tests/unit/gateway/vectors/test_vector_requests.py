"""Requests for vectors through a whole gateway: what counts towards limits, and what is computed first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from tests.support.clients.gateway_calls import ids
from tests.support.clients.http_gateway import COMPLETIONS, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense, fake_vector

EMBEDDINGS = "/v1/embeddings"
HEADERS = {"authorization": "Bearer ann-ann-ann-ann-ann"}


def keys_file(directory: Path, limits: str) -> Path:
    file = directory / "keys.toml"
    file.write_text(f'[[keys]]\nname = "ann"\nkey = "ann-ann-ann-ann-ann"\n{limits}\n')
    return file


def serve(directory: Path, test: Any, *, limits: str = "", **options: Any) -> FakeDense:
    dense = FakeDense(lambda submit: ids(" a") * 2000, step_s=0.001)
    with_client(directory, dense, test, runner="pooling", api_keys_file=keys_file(directory, limits), **options)
    return dense


async def embed(client: httpx2.AsyncClient, prompts: list[list[int]], **fields: Any) -> httpx2.Response:
    return await client.post(EMBEDDINGS, json={"input": prompts} | fields, headers=HEADERS)


PROMPTS = [[10 + i, 11] for i in range(20)]


def test_inputs_beside_a_stream_count_as_one_answer(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"prompt": "a", "max_tokens": 1500, "stream": True}
        async with client.stream("POST", COMPLETIONS, json=body, headers=HEADERS) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            response = await embed(client, PROMPTS, normalize=False)
            assert response.status_code == 200, response.text
            found = [each["embedding"] for each in response.json()["data"]]
            np.testing.assert_allclose(found, [fake_vector(each) for each in PROMPTS], atol=1e-6)
            async with client.stream("POST", COMPLETIONS, json=body, headers=HEADERS) as second:
                await anext(second.aiter_lines())
                refused = await embed(client, PROMPTS)  # all of them or none
                assert refused.status_code == 429 and "would have 3 answers" in refused.text
            await anext(lines)  # the first one still runs

    dense = serve(tmp_path, test, limits="max_concurrent_answers = 2")
    assert len(dense.submits) == 2 + len(PROMPTS)


def test_inputs_of_a_request_count_as_one_request_and_all_their_tokens(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for _ in range(2):
            assert (await embed(client, PROMPTS)).status_code == 200
        refused = await embed(client, PROMPTS)
        assert refused.status_code == 429 and "2 requests a minute" in refused.text

    serve(tmp_path, test, limits="requests_per_minute = 2")

    async def test_tokens(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        assert (await embed(client, PROMPTS)).status_code == 200
        refused = await embed(client, PROMPTS[:1])  # 40 tokens of 39 have gone
        assert refused.status_code == 429 and "39 tokens a minute" in refused.text

    serve(tmp_path, test_tokens, limits="tokens_per_minute = 39")
