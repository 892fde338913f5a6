"""Journal entries: the stream's reader appends tokens, and the request's handler takes them."""

from __future__ import annotations

import asyncio

import pytest

from services.common.errors import InvalidRequest, PeerError
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import FinishReason
from tests.support.clients.generation_requests import make_request, open_entry, take


def test_seq_ids_are_unique_over_gateways() -> None:
    journals = [Journal() for _ in range(3)]
    seq_ids = [open_entry(journal, make_request(str(i))).seq_id for journal in journals for i in range(50)]
    assert len(set(seq_ids)) == 150
    assert all(0 < seq_id < 2**63 for seq_id in seq_ids)


def test_a_request_id_can_be_used_again_after_its_request() -> None:
    journal = Journal()
    entry = open_entry(journal, make_request("mine"))
    with pytest.raises(InvalidRequest, match="'mine' is in use"):
        open_entry(journal, make_request("mine"))
    journal.close(entry)
    assert list(journal.unfinished()) == []
    again = open_entry(journal, make_request("mine"))
    assert list(journal.unfinished()) == [again]


def test_tokens_that_arrived_meanwhile_are_taken_together() -> None:
    async def test() -> None:
        entry = open_entry(Journal(), make_request())
        waiting = asyncio.create_task(take(entry))
        await asyncio.sleep(0)
        entry.append(5, 0.0)
        entry.append(6, 0.0)
        assert await waiting == [5, 6]
        entry.append(7, 0.0)
        entry.append(8, 0.0)
        entry.finish(FinishReason.LENGTH)
        assert await take(entry) == [7, 8]
        assert entry.output_token_ids == [5, 6, 7, 8]

    asyncio.run(test())


def test_tokens_before_an_error_are_taken_before_it_is_raised() -> None:
    async def test() -> None:
        entry = open_entry(Journal(), make_request())
        entry.append(5, 0.0)
        entry.fail(PeerError("gone"))
        assert await take(entry) == [5]
        with pytest.raises(PeerError, match="gone"):
            await take(entry)

    asyncio.run(test())


def test_a_waiting_handler_gets_the_error() -> None:
    async def test() -> None:
        entry = open_entry(Journal(), make_request())
        waiting = asyncio.create_task(take(entry))
        await asyncio.sleep(0)
        entry.fail(PeerError("gone"))
        with pytest.raises(PeerError, match="gone"):
            await waiting

    asyncio.run(test())


def test_an_error_after_the_end_changes_nothing() -> None:
    async def test() -> None:
        entry = open_entry(Journal(), make_request())
        entry.append(5, 0.0)
        entry.finish(FinishReason.STOP)
        entry.fail(PeerError("gone"))
        assert await take(entry) == [5]
        assert (entry.finish_reason, entry.error) == (FinishReason.STOP, None)

    asyncio.run(test())


def test_only_unfinished_sequences_are_continued() -> None:
    journal = Journal()
    entries = [open_entry(journal, make_request(str(i))) for i in range(4)]
    entries[0].finish(FinishReason.LENGTH)
    entries[1].fail(PeerError("gone"))
    journal.close(entries[2])
    assert list(journal.unfinished()) == [entries[3]]


def test_one_stream_at_a_time_runs_a_sequence_until_it_is_closed() -> None:
    journal = Journal()
    first, second = journal.new_stream(), journal.new_stream()
    moved, kept = (open_entry(journal, make_request(name)) for name in ("moved", "kept"))
    for entry in (moved, kept):
        first.add(entry)
    second.add(moved)
    assert (list(first.unfinished()), list(second.unfinished())) == ([kept], [moved])
    assert moved.stream is second and first.get(moved.seq_id) is None
    journal.close(moved)
    assert second.get(moved.seq_id) is None and len(second) == 0
    assert first.gateway == second.gateway == kept.seq_id >> 32


def test_a_shut_journal_ends_old_sequences_and_refuses_new_ones() -> None:
    journal = Journal()
    entry = open_entry(journal, make_request("old"))
    journal.shut(PeerError("shutting down"))
    assert isinstance(entry.error, PeerError)
    with pytest.raises(PeerError, match="shutting down"):
        open_entry(journal, make_request("new"))


def test_the_queue_is_counted_until_a_sequence_starts_or_ends() -> None:
    journal = Journal()
    entries = journal.open(make_request("a", prompt_token_ids=[1] * 5, n=2, best_of=3))
    [other] = journal.open(make_request("b", prompt_token_ids=[1] * 7))
    assert (journal.waiting.own, journal.waiting_tokens.own) == (4, 22)
    entries[0].start(0.0, 0)
    entries[0].start(0.0, 0)  # a second time, after a worker died
    journal.close(entries[0])
    journal.close(other)  # cancelled before it started
    assert (journal.waiting.own, journal.waiting_tokens.own) == (2, 10)
