"""A search that is submitted again with its beams delays no other request; one that is too large fails alone."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from services.common.beams.options import BeamSearchOptions
from services.common.config import PeerSection
from services.common.errors import CapacityError
from services.gateway.link.dense_pool import DensePool
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import JournalEntry
from services.gateway.link.search_record import SearchRecord
from services.pb import dense_pb2, sampling_pb2
from tests.support.clients.generation_requests import make_request, open_entry, take
from tests.support.running_gateway import run, until
from tests.support.workers.fake_dense import FakeDense

MAX_MESSAGE_BYTES = 2**20


class Link:
    """A journal whose sequences wait for a dense worker."""

    def __init__(self, tmp_path: Path) -> None:
        self.address = f"unix:{tmp_path}/dense.sock"
        self.dense, self.journal = FakeDense(lambda submit: range(10, 20)), Journal()
        peers = PeerSection(max_message_bytes=MAX_MESSAGE_BYTES)
        self.pool = DensePool(self.address, peers, self.journal, self._on_connection)

    async def _on_connection(self, is_connected: bool) -> None: ...

    def submit(self, name: str, *, num_steps: int | None = None) -> JournalEntry:
        """`num_steps`: a search has made so many, each with 1.2 kB; None: no search."""
        if num_steps is None:
            entry = open_entry(self.journal, make_request(name, max_tokens=4))
        else:
            options = BeamSearchOptions(2, 1)
            request = make_request(name, max_tokens=10**6, best_of=2, beam_search=options, num_logprobs=100)
            entry = open_entry(self.journal, request)
            logprobs = sampling_pb2.TokenLogprobs(top_token_ids=range(300, 400), top_logprobs=[-0.1] * 100)
            for index in range(num_steps):
                entry.add_search_step(
                    dense_pb2.BeamStep(
                        parents=[0, 1] if index else [0, 0],
                        token_ids=[5, 6],
                        scores=[-1.0, -2.0],
                        logprobs=[logprobs] * 2,
                    )
                )
        self.pool.submit(entry)
        return entry

    async def __aenter__(self) -> Link:
        self._task = asyncio.create_task(self.pool.run())
        await self.dense.start(self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        await self.dense.kill()


def test_a_search_too_large_for_a_message_fails_alone(tmp_path: Path) -> None:
    async def test() -> None:
        link = Link(tmp_path)
        large, small, other = (
            link.submit("large", num_steps=1000),
            link.submit("small", num_steps=100),
            link.submit("other"),
        )
        async with link:
            tokens: list[int] = []
            while len(tokens) < 4:
                tokens += await take(other)
            with pytest.raises(CapacityError, match=rf"have \d+ bytes, peers.max_message_bytes is {MAX_MESSAGE_BYTES}"):
                await take(large)
            assert [submit.spec.request_id for submit in link.dense.submits] == ["small", "other"]
            [beam, _] = link.dense.submits[0].search.beams
            assert list(beam.token_ids) == [5] * 100 and not small.is_ended
            assert list(beam.logprobs[99].top_token_ids) == list(range(300, 400))

    run(test())


def test_a_search_is_encoded_outside_of_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        threads: list[threading.Thread] = []
        encode = SearchRecord.encode

        def noted(record: SearchRecord) -> object:
            threads.append(threading.current_thread())
            return encode(record)

        monkeypatch.setattr(SearchRecord, "encode", noted)
        link = Link(tmp_path)
        link.submit("search", num_steps=3)
        async with link:
            await until(lambda: bool(link.dense.submits))
            assert len(threads) == 1 and threads[0] is not threading.current_thread()

    run(test())
