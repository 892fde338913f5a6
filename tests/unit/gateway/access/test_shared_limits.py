"""The limits of several gateway processes together: those of the queue, of memory and of API keys."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import IO, Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common import shared_counts
from services.common.errors import CapacityError, RateLimited
from services.common.shared_counts import SharedCounts
from services.gateway.access.access import Access
from services.gateway.access.admission import Admission
from services.gateway.access.rate_limits import RateLimits, TokenBucket, Usage
from services.gateway.link.journal import Journal
from services.gateway.resources.memory_budget import HeldMemory, MemoryBudget
from services.gateway.resources.repeatable import Repeatable
from services.gateway.resume import recordings
from services.gateway.resume.recording import Record, Recording
from services.gateway.resume.recordings import Recordings
from tests.support.clients.generation_requests import make_request
from tests.support.examples import examples

CLIENT = (0, 1)


@pytest.fixture
def processes(tmp_path: Path) -> list[SharedCounts]:
    SharedCounts.make(tmp_path / "counts", 2)
    processes = [SharedCounts(tmp_path / "counts", index) for index in range(2)]
    return processes


def test_the_queue_is_that_of_all_processes(processes: list[SharedCounts]) -> None:
    journals = [Journal(counts) for counts in processes]
    first, second = [Admission(journal, 3, 100, counts) for journal, counts in zip(journals, processes, strict=True)]
    anybody = Access(None, "").identify(None)

    def enter(admission: Admission, journal: Journal, name: str, num_tokens: int = 1) -> None:
        ticket = admission.open(anybody)
        request = make_request(name, prompt_token_ids=[1] * num_tokens)
        try:
            ticket.admit(request)
        except CapacityError:
            ticket.close()
            raise
        journal.open(request)

    enter(first, journals[0], "a", 60)
    with pytest.raises(CapacityError, match="60 prompt tokens are waiting, 50 more would exceed the limit of 100"):
        enter(second, journals[1], "too long", 50)
    enter(second, journals[1], "b")
    preparing = first.open(anybody)  # it counts, too
    with pytest.raises(CapacityError, match="3 answers are waiting to start, 1 more would exceed the limit of 3"):
        enter(second, journals[1], "c")
    preparing.close()
    enter(second, journals[1], "c")
    assert (journals[0].waiting.own, journals[1].waiting.own) == (1, 2), "what metrics show is each process's own"


def test_the_answers_of_a_key_are_those_in_all_processes(processes: list[SharedCounts]) -> None:
    limits = RateLimits(max_concurrent_answers=2)
    first, second = [Usage("team", limits, counts.of_keys(["team"])[0]) for counts in processes]
    other = Usage("other", limits, processes[1].of_keys(["other"])[0])
    first.open_request()
    second.open_request()
    for usage in (first, second):
        with pytest.raises(RateLimited, match="'team' would have 3 answers at once, its limit is 2"):
            usage.open_request()
    other.open_request()
    first.close_answers(1)
    second.open_request()


def test_keys_without_a_place_change_nothing(
    processes: list[SharedCounts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_counts, "MAX_KEYS", 2)
    secrets = {name: f"{name}-{'x' * 16}" for name in "abcd"}

    def write(*names: str, limit: int) -> None:
        lines = [f'[[keys]]\nname = "{n}"\nkey = "{secrets[n]}"\nmax_concurrent_answers = {limit}\n' for n in names]
        (tmp_path / "keys.toml").write_text("".join(lines))

    write("a", "b", limit=1)
    access = Access(tmp_path / "keys.toml", "", counts=processes[0])
    write("a", "c", "d", limit=99)
    access.reload_if_changed()
    assert access.key_names == {"a", "b"}
    caller = access.identify(f"Bearer {secrets['a']}")
    caller.usage.open_request()
    with pytest.raises(RateLimited, match="its limit is 1"):
        caller.usage.open_request()


def open_without_room(path: Path, opens: Callable[..., IO[Any]], failing: Path, *args: Any, **options: Any) -> IO[Any]:
    if path == failing:
        raise OSError(errno.EMFILE, "Too many open files")
    return opens(path, *args, **options)


def test_keys_that_could_not_be_taken_are_taken_by_the_next_look(
    tmp_path: Path, processes: list[SharedCounts], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.toml"

    def write(name: str) -> None:
        file.write_text(f'[[keys]]\nname = "{name}"\nkey = "{name * 16}"\n')

    write("a")
    access = Access(file, "", counts=processes[0])
    monkeypatch.setattr(shared_counts.time, "sleep", Mock(side_effect=AssertionError("it waits in the event loop")))
    write("bb")
    with processes[1]._locked(0.0):
        access.reload_if_changed()
    assert access.key_names == {"a"}
    access.reload_if_changed()
    assert access.key_names == {"bb"}
    write("ccc")
    for failing in (processes[0]._path, file):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", partialmethod(open_without_room, Path.open, failing))
            access.reload_if_changed()
        assert access.key_names == {"bb"}
    access.reload_if_changed()
    assert access.key_names == {"ccc"}


@settings(max_examples=examples(50, 10), deadline=None)
@given(
    st.floats(6, 600),
    st.lists(st.tuples(st.sampled_from([0, 1]), st.floats(0, 3), st.integers(1, 20)), min_size=1, max_size=300),
)
def test_no_interval_gets_more_than_the_rate_of_a_key_and_one_burst_in_all_processes(
    tmp_path_factory: pytest.TempPathFactory, per_minute: float, wishes: list[tuple[int, float, int]]
) -> None:
    """Each process looks every 2 s what the others have taken, so as much more as comes in that time is possible."""
    path = tmp_path_factory.mktemp("counts") / "counts"
    SharedCounts.make(path, 2)
    processes = [SharedCounts(path, index) for index in range(2)]
    buckets = [TokenBucket(per_minute, 0.0, counts.of_keys(["team"])[0].taken_tokens) for counts in processes]
    now_s = looked_s = 0.0
    taken: list[tuple[float, int]] = []
    for index, pause_s, amount in wishes:
        now_s += pause_s
        while looked_s + 2.0 <= now_s:
            looked_s += 2.0
            for bucket in buckets:
                bucket.refill(looked_s)
        if amount <= per_minute and buckets[index].wait_s(amount, now_s) == 0:
            buckets[index].take(amount, now_s)
            taken.append((now_s, amount))
    for first, (start_s, _) in enumerate(taken):
        for last, (end_s, _) in enumerate(taken[first:], start=first):
            total = sum(amount for _, amount in taken[first : last + 1])
            assert total <= per_minute * (1 + (end_s - start_s + 2.0) / 60) + 1e-6


def test_memory_that_another_process_gives_back_goes_to_who_waits(processes: list[SharedCounts]) -> None:
    async def test() -> None:
        first, second = [MemoryBudget(1000, 20.0, 1, counts) for counts in processes]
        holding = HeldMemory(first, CLIENT)
        await holding.reserve(700, "a body")
        held = HeldMemory(second, CLIENT)
        assert second.num_held == 700
        waiting = asyncio.create_task(held.reserve(400, "logits"))
        while not first.num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        with pytest.raises(CapacityError, match=r"700 bytes of memory, .* 1 requests wait already"):
            await HeldMemory(first, (0, 2)).reserve(400, "a body")
        holding.release()
        await waiting
        assert (first.num_held, first.num_waiting) == (400, 0)

    asyncio.run(asyncio.wait_for(test(), 60.0))


def test_resumable_requests_are_counted_in_all_processes(processes: list[SharedCounts]) -> None:
    owner = ("", 1)
    first, second = [
        Recordings(MemoryBudget(1000), None, 1.0, 1, counts, Mock())  # type: ignore[arg-type]
        for counts in processes
    ]
    second.make_room(owner)
    first._num_running.add(1)  # a request begins there
    with pytest.raises(CapacityError, match="1 resumable requests are running, the limit"):
        second.make_room(owner)


def test_answers_that_have_ended_leave_the_room_to_other_processes(
    processes: list[SharedCounts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "LOOK_S", 0.01)
    owner = ("", 1)

    async def test() -> None:
        budgets = [MemoryBudget(1000, 20.0, 5, counts) for counts in processes]
        first, second = [
            Recordings(budget, Mock(), 60.0, 1, counts, Mock())
            for budget, counts in zip(budgets, processes, strict=True)
        ]
        held, record = HeldMemory(budgets[0], CLIENT), Record(b"", Repeatable("a"))
        await held.reserve(500, "a body")
        is_done = asyncio.Event()

        async def produce(recording: Recording) -> None:
            await is_done.wait()
            recording.begin(b"", is_stream=False)
            await recording.add(b"text")

        recording = first.start((owner, "http", "a"), record, held, produce)
        with pytest.raises(CapacityError, match="1 resumable requests are running"):
            second.make_room(owner)
        is_done.set()
        await recording.task
        assert first.find(recording.name) is recording, "its client may come back"
        second.make_room(owner)
        await HeldMemory(budgets[1], (0, 2)).reserve(600, "logits")
        assert first.find(recording.name) is None, "it gave way to a request of another process"
        await first.close()

    asyncio.run(asyncio.wait_for(test(), 60.0))
