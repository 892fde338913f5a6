"""What the launcher keeps of resumable requests: one process runs each, and a record outlives it for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from services.launch.resumables import BYTES_PER_ENTRY, Replies, Resumables
from services.pb import gateway_peers_pb2, resumables_pb2

TIMEOUT_S = 0.05
MAX_ROUNDS = 20


def run(test: Callable[[Resumables], Awaitable[None]], **limits: Any) -> None:
    async def body() -> None:
        await test(Resumables(**{"max_number": 100, "max_bytes": 10**6, "timeout_s": TIMEOUT_S, **limits}))

    asyncio.run(body())


def name_of(text: str, key_name: str = "ann") -> gateway_peers_pb2.ResumableName:
    return gateway_peers_pb2.ResumableName(owner={"key_name": key_name}, kind="http", name=text)


def claim_of(text: str, *, is_new: bool = True, key_name: str = "ann", **fields: Any) -> resumables_pb2.Claim:
    claim = resumables_pb2.Claim(name=name_of(text, key_name), fingerprint=b"f", **fields)
    if is_new:
        claim.record.CopyFrom(resumables_pb2.ResumableRecord(fingerprint=b"f", entropy=b"first", message=b"m" * 10))
    return claim


def attached(resumables: Resumables, *processes: str) -> list[Replies]:
    queues = [Replies() for _ in processes]
    for process, replies in zip(processes, queues, strict=True):
        resumables.attach(process, replies)
    return queues


def test_one_process_runs_a_request_and_others_read_it_there() -> None:
    async def test(resumables: Resumables) -> None:
        attached(resumables, "a", "b")
        assert resumables.claim("a", claim_of("x")).new_is_kept
        assert resumables.claim("b", claim_of("x")).running_at == "a"
        assert resumables.claim("b", claim_of("x", is_new=False)).running_at == "a"
        assert resumables.claim("b", claim_of("y", is_new=False)).is_unknown
        assert resumables.claim("b", claim_of("x", key_name="bob")).new_is_kept, "a name is its owner's"
        other = claim_of("x")
        other.fingerprint = b"g"
        assert resumables.claim("b", other).is_other
        assert resumables.claim("a", claim_of("x")).again.entropy == b"first", "it says that it does not run it"

    run(test)


def test_the_record_of_a_dead_process_is_given_once_and_kept_for_the_next_death() -> None:
    async def test(resumables: Resumables) -> None:
        [first, second, _] = attached(resumables, "a", "b", "c")
        resumables.claim("a", claim_of("x"))
        resumables.detach("a", first)
        later = claim_of("x")
        later.record.entropy = b"later"
        assert resumables.claim("b", later).again.entropy == b"first"
        assert resumables.claim("c", claim_of("x")).running_at == "b"
        await asyncio.sleep(2 * TIMEOUT_S)  # the timer of the first death means nothing now
        resumables.detach("b", second)
        assert resumables.claim("c", claim_of("x", is_new=False)).again.message == b"m" * 10

    run(test)


def test_a_record_that_nobody_claims_is_dropped() -> None:
    async def test(resumables: Resumables) -> None:
        [first, _] = attached(resumables, "a", "b")
        for text in ("x", "y"):
            resumables.claim("a", claim_of(text))
        resumables.release("a", name_of("y"))
        assert resumables.claim("b", claim_of("y", is_new=False)).HasField("again")
        resumables.detach("a", first)
        assert len(resumables) == 2
        await asyncio.sleep(2 * TIMEOUT_S)
        assert resumables.claim("b", claim_of("x", is_new=False)).is_unknown
        assert len(resumables) == 1

    run(test)


def test_a_released_request_that_is_released_again_has_its_whole_time() -> None:
    """A busy machine may stop this process for so long that the time is over. Then it is tried again."""

    async def test(resumables: Resumables) -> None:
        loop = asyncio.get_running_loop()
        attached(resumables, "a")
        for number in range(MAX_ROUNDS):
            name = f"{number}"
            resumables.claim("a", claim_of(name))
            resumables.release("a", name_of(name))
            await asyncio.sleep(0.6 * TIMEOUT_S)
            is_claimed_in_time = bool(len(resumables))
            resumables.claim("a", claim_of(name))
            released_at = loop.time()
            resumables.release("a", name_of(name))
            await asyncio.sleep(0.6 * TIMEOUT_S)
            is_kept = bool(len(resumables))
            is_in_time = is_claimed_in_time and loop.time() < released_at + TIMEOUT_S
            await asyncio.sleep(TIMEOUT_S)
            assert len(resumables) == 0
            if is_in_time:
                assert is_kept
                return
        raise AssertionError(f"{MAX_ROUNDS} times too late")

    run(test)


def test_a_silent_process_loses_its_request_and_has_no_say_in_it() -> None:
    async def test(resumables: Resumables) -> None:
        [first, second, _] = attached(resumables, "a", "b", "c")
        resumables.claim("a", claim_of("x"))
        assert resumables.claim("b", claim_of("x", instead_of="c")).running_at == "a", "another one is silent"
        assert resumables.claim("b", claim_of("x", instead_of="a")).again.entropy == b"first"
        assert first.get_nowait().taken == name_of("x")
        resumables.forget("a", name_of("x"))
        resumables.release("a", name_of("x"))
        resumables.detach("a", first)
        assert resumables.claim("c", claim_of("x")).running_at == "b"
        assert first.empty()
        assert second.empty()

    run(test)


def test_what_is_forgotten_is_new_again() -> None:
    async def test(resumables: Resumables) -> None:
        attached(resumables, "a", "b")
        resumables.claim("a", claim_of("x"))
        resumables.forget("a", name_of("x"))
        assert resumables.claim("b", claim_of("x", is_new=False)).is_unknown
        assert resumables.claim("b", claim_of("x")).new_is_kept

    run(test)


def test_a_process_that_starts_again_is_another_one() -> None:
    async def test(resumables: Resumables) -> None:
        [first] = attached(resumables, "a")
        resumables.claim("a", claim_of("x"))
        attached(resumables, "a", "b")  # before the end of the first one has been noticed
        assert resumables.claim("b", claim_of("x")).HasField("again")
        resumables.claim("a", claim_of("y"))
        resumables.detach("a", first)
        assert resumables.claim("b", claim_of("y")).running_at == "a"

    run(test)


def test_number_and_bytes_are_bounded() -> None:
    async def test(resumables: Resumables) -> None:
        attached(resumables, "a")
        replies = [resumables.claim("a", claim_of(f"{i}")) for i in range(20)]
        assert [reply.new_is_kept for reply in replies] == [True] * 5 + [False] * 15
        resumables.forget("a", name_of("0"))
        assert resumables.claim("a", claim_of("0")).new_is_kept
        for number in range(5):
            resumables.forget("a", name_of(f"{number}"))
        large = claim_of("large")
        large.record.message = bytes(10_000 - BYTES_PER_ENTRY)
        assert resumables.claim("a", large).new_is_kept
        assert not resumables.claim("a", claim_of("small")).new_is_kept
        resumables.forget("a", name_of("large"))
        assert resumables.claim("a", claim_of("small")).new_is_kept

    run(test, max_number=5, max_bytes=10_000)
