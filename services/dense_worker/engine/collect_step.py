"""Waits for a published step, and for what the attention worker has to say of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.common.engine_thread import EngineThread
from services.common.errors import PeerError
from services.dense_worker.engine.session import InFlight, Session
from services.step import StepResult

_POLL_S = 20e-6  # how often to look whether a GPU has ended a step


def collect_step(
    step: InFlight,
    session: Session,
    thread: EngineThread,
    on_call: Callable[[Session], None],
    timeout_s: float,
    near_end: Callable[[], object] | None = None,
) -> StepResult:
    """The result of a step, once the attention worker has reported its errors, too.

    Calls that come meanwhile are made, with `on_call` after each while the step runs. `near_end` is called after three
    quarters of it, when the calls up to then are made; only a step that runs when it is collected may have it. Raises
    `PeerError` after `timeout_s`, or when the session has ended.
    """
    assert step.running is not None, "a step is launched before it is collected"
    channel, plan = step.channel, step.published.plan
    waited_s = channel.waited_s
    deadline = time.monotonic() + timeout_s
    while not step.running.is_done():
        if _make_call(session, thread, _POLL_S):
            on_call(session)
        if time.monotonic() > deadline:  # however much comes
            raise PeerError(f"step {plan.step_id} has not ended after {timeout_s} s")
    if near_end is None:
        result = step.running.collect()
    else:
        result = step.running.collect(lambda: _interrupt(session, thread, on_call, near_end))
    deadline = time.monotonic() + timeout_s
    while session.num_errors[plan.lane] != channel.num_errors:  # they say whose rows have no meaning
        left_s = deadline - time.monotonic()
        if left_s <= 0.0 or not _make_call(session, thread, left_s):
            raise PeerError(f"errors up to step {plan.step_id} are not here after {timeout_s} s")
    step.wait_s = None if waited_s is None else channel.waited_s - waited_s
    return result


def _interrupt(
    session: Session, thread: EngineThread, on_call: Callable[[Session], None], near_end: Callable[[], object]
) -> None:
    while _make_call(session, thread, 0.0):
        on_call(session)
    near_end()


def _make_call(session: Session, thread: EngineThread, timeout_s: float) -> bool:
    has_come = thread.make_call(timeout_s)
    if session.has_ended:
        raise PeerError("the attention worker went away")
    return has_come
