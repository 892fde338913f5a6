"""The stream to the dense worker does little work in each turn of the event loop, even for large messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.token_logprobs import LogprobRows
from services.gateway.link import dense_client
from services.gateway.link.journal_entry import JournalEntry
from services.lora.prompt_embeds import make_prompt_embeds
from services.pb import dense_pb2
from tests.support.clients.generation_requests import make_request, open_entry
from tests.support.reports import prompt_logprobs
from tests.support.running_gateway import run, until
from tests.support.workers.fake_dense import FakeDense, fake_logprob
from tests.unit.gateway.link.test_dense_client import connected, count_up, take_all


async def turns_of(done: Callable[[], bool], count: Callable[[], int]) -> list[int]:
    """The growth of `count()` in each turn of the event loop until `done()`."""
    growths, last = [], count()
    while not done():
        await asyncio.sleep(0)
        growths.append(count() - last)
        last = count()
    return growths


def test_a_new_stream_gets_one_sequence_per_turn_of_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_made = 0
    make = dense_client.encode_submit

    def counting(entry: JournalEntry) -> dense_pb2.GatewayMessage:
        nonlocal num_made
        num_made += 1
        return make(entry)

    monkeypatch.setattr(dense_client, "encode_submit", counting)

    async def test() -> None:
        dense = FakeDense(lambda submit: ())
        async with connected(tmp_path, dense) as (gateway, address):
            for i in range(50):
                gateway.submit(str(i), [1] * 1000, max_tokens=5)
            growths = await turns_of(lambda: len(dense.submits) == 50, lambda: num_made)
            await dense.kill()
            dense.submits.clear()
            await dense.start(address)
            growths += await turns_of(lambda: len(dense.submits) == 50, lambda: num_made)
            assert sum(growths) == num_made == 100
            assert max(growths) == 1

    run(test())


def test_a_sequence_closed_before_it_is_written_is_never_submitted(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(count_up)
        async with connected(tmp_path, dense) as (gateway, _):
            closed = gateway.submit("closed", [10], max_tokens=5)
            gateway.pool.cancel(closed)
            gateway.journal.close(closed)
            await take_all(gateway.submit("other", [20], max_tokens=1))
            assert [submit.spec.request_id for submit in dense.submits] == ["other"]

    run(test())


def test_a_client_waits_for_two_sequences_of_another_one_not_for_all(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(lambda submit: ())
        async with connected(tmp_path, dense) as (gateway, _):
            for name, client in [*((str(i), 1) for i in range(50)), ("other", 2), ("another", 2)]:
                request = make_request(name, prompt_token_ids=[1], max_tokens=5, client=client)
                entry = open_entry(gateway.journal, request)
                gateway.pool.submit(entry)
            await until(lambda: len(dense.submits) == 52)
            names = [submit.spec.request_id for submit in dense.submits]
            assert names == ["0", "other", "1", "another", *(str(i) for i in range(2, 50))]

    run(test())


def test_answers_that_share_vectors_are_written_together_and_their_table_once(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(lambda submit: ())
        async with connected(tmp_path, dense) as (gateway, _):
            for client in (1, 2):
                table = make_prompt_embeds(bytes([client]) * 64, 2, 16, "float16", "prompt_embeds")
                given = {"prompt_token_ids": [1000, 1001], "max_tokens": 5, "best_of": 3, "n": 3, "client": client}
                request = replace(make_request(str(client), **given), prompt_embeds=table)
                for entry in gateway.journal.open(request):
                    gateway.pool.submit(entry)
            await until(lambda: len(dense.submits) == 6)
            assert [submit.spec.request_id for submit in dense.submits] == ["1"] * 3 + ["2"] * 3
            assert len(dense.table_parts) == 2

    run(test())


def test_log_probabilities_of_a_long_prompt_arrive_whole(tmp_path: Path) -> None:
    async def test() -> None:
        async with connected(tmp_path, FakeDense(count_up)) as (gateway, _):
            prompt = list(range(10, 8010))
            request = make_request("long", prompt_token_ids=prompt, max_tokens=1, features=prompt_logprobs(2))
            entry = open_entry(gateway.journal, request)
            gateway.pool.submit(entry)
            assert await take_all(entry)
            assert entry.records["prompt_logprobs"].num_reported == len(prompt)
            found = entry.take_reports(0, is_last=False, with_prompt=True)["prompt_logprobs"]
            assert isinstance(found, LogprobRows)
            for token_id, each in zip(prompt[1:], found, strict=True):
                likeliest = [token_id - 1, token_id]
                assert each.logprob == fake_logprob(token_id) and each.rank == token_id + 1
                assert each.top == tuple((other, fake_logprob(other)) for other in likeliest)

    run(test())
