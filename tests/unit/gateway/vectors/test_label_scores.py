"""Scores by the probabilities of labels, of a gateway with a scripted dense worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest

from services.gateway.http import json_route
from tests.support.clients.http_gateway import check_error, with_client
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense


@pytest.mark.parametrize("path", ["/v1/score", "/generative_scoring"])
@pytest.mark.parametrize("num_user_characters", [0, 100])
def test_scores_that_are_aborted_are_an_error_of_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, num_user_characters: int
) -> None:
    """Also of a body that is large, whose answer is sent while it is made."""
    monkeypatch.setattr(json_route, "MAX_INLINE_BYTES", 150)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"query": "a", "items": ["b", "c"], "label_token_ids": [5], "user": "u" * num_user_characters}
        scores = asyncio.create_task(client.post(path, json=body))
        await until(lambda: len(dense.running) == 2)
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 200
        check_error(await scores, 499, None, "aborted")

    dense = FakeDense(lambda submit: [])
    with_client(tmp_path, dense, test)
