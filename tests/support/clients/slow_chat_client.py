"""The chat client on a machine that stops its other threads whenever that does harm.

When a call has ended, gRPC's thread first waits for the lock of the call until the client has closed its channel, and
then holds it until the client has begun to free its calls, or has nothing left to do but to end the interpreter. The
thread of a timer that has cancelled the call ends only after this, so that the call is in use until then.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from grpc import _channel

from services.gateway.chat_client import main

MAX_STOP_S = 2.0
LONGER_S = 0.05  # than the client takes to free its calls; gRPC's thread stops for twice that

event_handler, handle_event, close = _channel._event_handler, _channel._handle_event, _channel.Channel._close
is_closed, has_lock, is_collecting = threading.Event(), threading.Event(), threading.Event()


def wait_for_close(*arguments: Any) -> Callable[[Any], Any]:
    handler = event_handler(*arguments)

    def handle(event: Any) -> Any:
        if len(event.batch_operations) > 1:  # with the call's status
            is_closed.wait(MAX_STOP_S)
        return handler(event)

    return handle


def hold_lock(event: Any, state: Any, *arguments: Any) -> Any:
    callbacks = handle_event(event, state, *arguments)
    if not state.due:  # the call's last event
        has_lock.set()
        deadline = time.monotonic() + MAX_STOP_S
        while threading.main_thread().is_alive() and not is_collecting.wait(0.01) and time.monotonic() < deadline:
            pass
        time.sleep(2 * LONGER_S)  # meanwhile the interpreter may end, and this thread with it
    return callbacks


def close_and_wait(channel: _channel.Channel) -> None:
    close(channel)
    is_closed.set()
    has_lock.wait(MAX_STOP_S)
    is_collecting.clear()


class SlowTimer(threading.Timer):
    def run(self) -> None:
        super().run()
        time.sleep(LONGER_S)


def note_collection(phase: str, info: dict[str, int]) -> None:
    if info["generation"] == 2:
        is_collecting.set()


if __name__ == "__main__":
    _channel._event_handler, _channel._handle_event = wait_for_close, hold_lock
    _channel.Channel._close = close_and_wait
    threading.Timer = SlowTimer
    gc.callbacks.append(note_collection)
    sys.exit(main())
