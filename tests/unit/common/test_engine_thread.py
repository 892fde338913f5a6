"""The engine thread makes calls in order, works between them, and stops within a time limit."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial

import pytest

from services.common.engine_thread import EngineThread, end_waits_in_time

TIMEOUT_S = 30.0


def test_calls_run_in_order_on_one_thread_and_return_their_outcomes() -> None:
    thread = EngineThread()
    made: list[tuple[int, int]] = []
    for number in range(100):
        thread.post(lambda number=number: made.append((number, threading.get_ident())))
    result, error = thread.submit(divmod, 7, 2), thread.submit(divmod, 7, 0)
    thread.start()
    assert result.result(TIMEOUT_S) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        error.result(TIMEOUT_S)
    assert thread.submit(len, made).result(TIMEOUT_S) == 100, "an error that somebody awaits ends nothing"
    assert [number for number, _ in made] == list(range(100))
    assert {ident for _, ident in made} != {threading.get_ident()} and len({ident for _, ident in made}) == 1
    assert thread.stop(TIMEOUT_S) and not thread.failure.done()


def test_work_runs_after_the_calls_and_repeats_until_it_can_wait() -> None:
    actions: queue.Queue[str] = queue.Queue()
    num_left = 3

    def work() -> float | None:
        nonlocal num_left
        actions.put("work")
        num_left -= 1
        return 0.0 if num_left else None

    thread = EngineThread(work)
    thread.post(actions.put, "first call")
    thread.post(actions.put, "second call")
    thread.start()
    assert [actions.get(timeout=TIMEOUT_S) for _ in range(5)] == ["first call", "second call", "work", "work", "work"]
    num_left = 1
    thread.post(actions.put, "third call")
    assert [actions.get(timeout=TIMEOUT_S) for _ in range(2)] == ["third call", "work"]
    assert thread.stop(TIMEOUT_S)


def test_a_short_wait_ends_although_a_call_came_before() -> None:
    """`queue.SimpleQueue` of CPython 3.11 and 3.12 then waits for the next call, however long that takes."""
    num_waits, has_made, has_ended = 2000, list[bool](), threading.Event()

    def work() -> None:
        for _ in range(num_waits):
            thread.post(lambda: None)
            has_made.append(thread.make_call(0.0))
            has_made.append(thread.make_call(1e-6))
        has_ended.set()

    thread = EngineThread(work)
    thread.start()
    assert has_ended.wait(TIMEOUT_S)
    assert has_made == [True, False] * num_waits
    assert thread.stop(TIMEOUT_S)


def test_no_call_is_lost_between_threads() -> None:
    thread, made, num_calls = EngineThread(lambda: 20e-6), list[int](), 2000
    thread.start()

    def post(first: int) -> None:
        for number in range(first, first + num_calls):
            thread.post(made.append, number)

    posting = [threading.Thread(target=post, args=(poster * num_calls,)) for poster in range(3)]
    for each in posting:
        each.start()
    for each in posting:
        each.join(TIMEOUT_S)
    assert thread.submit(len, made).result(TIMEOUT_S) == 3 * num_calls
    for poster in range(3):
        own = [each for each in made if each // num_calls == poster]
        assert own == list(range(poster * num_calls, (poster + 1) * num_calls))
    assert thread.stop(TIMEOUT_S)


def test_work_that_asks_for_a_delay_runs_again_without_a_call() -> None:
    actions: queue.Queue[None] = queue.Queue()

    def work() -> float:
        actions.put(None)
        return 0.001

    thread = EngineThread(work)
    thread.start()
    for _ in range(3):
        actions.get(timeout=TIMEOUT_S)
    assert thread.stop(TIMEOUT_S)


def test_work_can_make_calls_while_it_waits() -> None:
    made: queue.Queue[bool] = queue.Queue()
    is_working = threading.Event()

    def work() -> None:
        if not is_working.is_set():
            is_working.set()
            made.put(thread.make_call(TIMEOUT_S))
            made.put(thread.make_call(0.0))

    thread = EngineThread(work)
    thread.start()
    assert is_working.wait(TIMEOUT_S)
    assert thread.submit(threading.get_ident).result(TIMEOUT_S) != threading.get_ident()
    assert [made.get(timeout=TIMEOUT_S) for _ in range(2)] == [True, False]
    assert thread.stop(TIMEOUT_S)


@pytest.mark.parametrize("fails_in", ["call", "work"])
def test_an_error_that_nobody_awaits_ends_the_thread_and_is_its_failure(fails_in: str) -> None:
    error = RuntimeError("a bug")

    def fail() -> None:
        raise error

    thread = EngineThread(fail if fails_in == "work" else lambda: None)
    if fails_in == "call":
        thread.post(fail)
    thread.start()
    assert thread.failure.exception(TIMEOUT_S) is error
    assert thread.stop(TIMEOUT_S)
    with pytest.raises(CancelledError):
        thread.submit(len, "late").result(TIMEOUT_S)


def test_a_stop_keeps_its_time_limit_and_cancels_calls_that_have_not_begun() -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def block() -> str:
        has_begun.set()
        assert may_end.wait(TIMEOUT_S)
        return "ended"

    thread = EngineThread()
    thread.start()
    blocking, waiting = thread.submit(block), thread.submit(len, "abc")
    assert has_begun.wait(TIMEOUT_S)
    assert not thread.stop(timeout_s=0.01)
    may_end.set()
    assert blocking.result(TIMEOUT_S) == "ended"
    with pytest.raises(CancelledError):
        waiting.result(TIMEOUT_S)
    assert thread.stop(TIMEOUT_S)


def test_what_comes_by_files_is_read_in_order_between_the_calls_of_other_threads() -> None:
    thread, seen = EngineThread(), queue.Queue[tuple[str, int]]()
    pipes = [os.pipe() for _ in range(2)]

    def reader(number: int) -> bool:
        data = os.read(pipes[number][0], 1)
        seen.put((f"pipe {number}", int.from_bytes(data)) if data else (f"end of {number}", threading.get_ident()))
        return bool(data)

    thread.start()
    for number, (source, _) in enumerate(pipes):
        thread.post(thread.read, source, lambda number=number: reader(number))
    own = thread.submit(threading.get_ident).result(TIMEOUT_S)
    for value in range(1, 101):
        for _, sink in pipes:
            os.write(sink, bytes([value]))
        assert thread.submit(lambda: 7).result(TIMEOUT_S) == 7, "it wakes for calls, too"
    found = [seen.get(timeout=TIMEOUT_S) for _ in range(200)]
    for number in range(2):
        assert [value for name, value in found if name == f"pipe {number}"] == list(range(1, 101))
    os.close(pipes[0][1])
    assert seen.get(timeout=TIMEOUT_S) == ("end of 0", own)
    os.write(pipes[1][1], b"x")
    assert seen.get(timeout=TIMEOUT_S) == ("pipe 1", ord("x")), "the first one is read no more"
    assert thread.submit(lambda: 7).result(TIMEOUT_S) == 7 and seen.empty()
    assert thread.stop(TIMEOUT_S) and not thread.failure.done()
    for each in (pipes[0][0], *pipes[1]):
        os.close(each)


def test_a_wait_beside_files_ends_in_time_and_work_goes_on() -> None:
    source, sink = os.pipe()
    worked = queue.Queue[None]()

    def work() -> float:
        worked.put(None)
        return 0.001

    thread = EngineThread(work)
    thread.post(thread.read, source, lambda: bool(os.read(source, 1)))
    thread.start()
    for _ in range(20):
        worked.get(timeout=TIMEOUT_S)
    assert thread.stop(TIMEOUT_S)
    os.close(source)
    os.close(sink)


def test_only_the_waits_of_the_thread_that_asks_for_it_end_in_time() -> None:
    prctl = ctypes.CDLL(None).prctl
    set_slack, get_slack, usual_ns = partial(prctl, 29), partial(prctl, 30), 50_000  # PR_{SET,GET}_TIMERSLACK

    def look() -> tuple[int, int]:
        before_ns = get_slack()
        end_waits_in_time()
        return before_ns, get_slack()

    def start_another() -> tuple[tuple[int, int], int]:
        set_slack(usual_ns)  # whatever this process has asked for before
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(look).result(), get_slack()

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(start_another).result() == ((usual_ns, 1), usual_ns)
