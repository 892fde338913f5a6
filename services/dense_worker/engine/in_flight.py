"""`InFlight`: a step that has been published, until its result is collected."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from services.channel import Channel
from services.common.engine_thread import EngineThread
from services.common.errors import PeerError
from services.dense_worker.engine.session import PublishedPlan, Session
from services.dense_worker.runner.model_runner import RunningStep
from services.step import StepResult

_POLL_S = 20e-6  # how often to look whether a GPU has ended a step


@dataclass(slots=True, eq=False)
class InFlight:
    """A published plan and its running step; points in time are on the monotonic clock."""

    published: PublishedPlan
    channel: Channel  # of its lane
    launch_start_s: float
    launch_s: float = 0.0  # host time to publish and launch it
    running: RunningStep | None = None  # None while it is being launched
    begin_s: float = 0.0  # when the step before it ended, or its own launch if that was later
    end_s: float = 0.0  # when its tokens were here
    wait_s: float | None = None  # spent waiting for the attention worker; None on CUDA, where no host sees it

    def collect(
        self, session: Session, thread: EngineThread, on_call: Callable[[], None], timeout_s: float
    ) -> StepResult:
        """Waits for the step, and for what the attention worker has to say of it.

        Calls that come meanwhile are made, with `on_call` after each while the step runs. Raises `PeerError` after
        `timeout_s`, or when the session has ended.
        """
        assert self.running is not None, "a step is launched before it is collected"
        channel, plan = self.channel, self.published.plan
        waited_s = channel.waited_s
        deadline = time.monotonic() + timeout_s
        while not self.running.is_done():
            if _make_call(session, thread, _POLL_S):
                on_call()
            if time.monotonic() > deadline:  # however much comes
                raise PeerError(f"step {plan.step_id} has not ended after {timeout_s} s")
        result = self.running.collect()
        deadline = time.monotonic() + timeout_s
        while session.num_errors[plan.lane] != channel.num_errors:  # they say whose rows have no meaning
            left_s = deadline - time.monotonic()
            if left_s <= 0.0 or not _make_call(session, thread, left_s):
                raise PeerError(f"errors up to step {plan.step_id} are not here after {timeout_s} s")
        self.wait_s = None if waited_s is None else channel.waited_s - waited_s
        return result


def _make_call(session: Session, thread: EngineThread, timeout_s: float) -> bool:
    has_come = thread.make_call(timeout_s)
    if session.has_ended:
        raise PeerError("the attention worker went away")
    return has_come
