"""Scores by the probabilities of labels, of a gateway with a scripted dense worker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx2
import pytest

from services.gateway.http import json_route
from services.gateway.resources.heavy_work import HeavyWork
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


@pytest.mark.parametrize("item_first", [False, True])
def test_a_wrong_query_is_blamed_and_not_the_items(tmp_path: Path, item_first: bool) -> None:
    wrong: list[tuple[list[int], list[list[int]], str, str]] = [
        ([5, 10**6], [[6]], "query", "query[1] is 1000000"),
        ([5] * 5000, [[6]], "query", "5000"),
        ([5], [[6], [6] * 5000], "items", "5000"),
        ([5], [[6]] * 65, "items", "65"),
    ]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for query, items, param, said in wrong:
            body = {"query": query, "items": items, "label_token_ids": [5], "item_first": item_first}
            check_error(await client.post("/v1/score", json=body), 400, param, said)
        body = {"query": [5], "items": [[10**6]], "label_token_ids": [5], "item_first": item_first}
        check_error(await client.post("/v1/score", json=body), 400, "items", "1000000", "vocabulary")

    with_client(tmp_path, FakeDense(lambda submit: []), test)


def test_prompts_with_a_long_query_are_made_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small body can have a query of thousands of tokens, which each item has beside it."""
    num_turns, turn = 0, HeavyWork.turn

    async def counted(heavy_work: HeavyWork) -> None:
        nonlocal num_turns
        num_turns += 1
        await turn(heavy_work)

    monkeypatch.setattr(HeavyWork, "turn", counted)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        content = json.dumps({"query": [1] * 5000, "items": [[2]] * 8, "label_token_ids": [5]}, separators=(",", ":"))
        headers = {"content-type": "application/json"}
        scores = asyncio.create_task(client.post("/v1/score", content=content, headers=headers))
        await until(lambda: len(dense.running) == 8)
        assert num_turns == 7
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 200
        check_error(await scores, 499, None, "aborted")
        assert [[*each.spec.prompt_token_ids] for each in dense.submits[:2]] == [[1] * 5000 + [2]] * 2

    dense = FakeDense(lambda submit: [], max_model_len=2**15)
    with_client(tmp_path, dense, test)
