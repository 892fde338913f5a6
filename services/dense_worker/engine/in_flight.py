"""`InFlight`: a step that has been published and launched, until its result is collected."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from services.common.errors import PeerError
from services.dense_worker.engine.inbox import Inbox
from services.dense_worker.engine.session import PublishedPlan, Session
from services.dense_worker.runner.model_runner import RunningStep
from services.step import StepResult

_POLL_S = 20e-6  # how often to look whether a GPU has ended a step


@dataclass(frozen=True, slots=True)
class InFlight:
    """A published plan and its running step."""

    session: Session
    published: PublishedPlan
    step: RunningStep
    launch_start_s: float  # on the monotonic clock
    launch_s: float  # host time to publish and launch it

    def collect(
        self, inbox: Inbox, is_attached: Callable[[], bool], on_call: Callable[[], None], timeout_s: float
    ) -> tuple[StepResult, float | None]:
        """Waits for the step, and for what the attention worker has to say of it.

        What comes meanwhile is handled, and `on_call` called after it, so that new sequences are open when the next
        step is planned. Returns the result, and the seconds waited for the attention worker (None on CUDA, where no
        host sees it). Raises `PeerError` after `timeout_s`, or when the session has ended.
        """
        step_id, lane = self.published.plan.step_id, self.published.plan.lane
        channel = self.session.attachment.channels[lane]
        waited_s = channel.waited_s
        deadline = time.monotonic() + timeout_s
        while not self.step.is_done():
            if self._handle_one(inbox, is_attached, _POLL_S):
                on_call()
            if time.monotonic() > deadline:  # however much comes
                raise PeerError(f"step {step_id} has not ended after {timeout_s} s")
        result = self.step.collect()
        deadline = time.monotonic() + timeout_s
        while self.session.num_errors[lane] != channel.num_errors:  # they say whose rows have no meaning
            left_s = deadline - time.monotonic()
            if left_s <= 0.0 or not self._handle_one(inbox, is_attached, left_s):
                raise PeerError(f"errors up to step {step_id} are not here after {timeout_s} s")
        return result, None if waited_s is None else channel.waited_s - waited_s

    def _handle_one(self, inbox: Inbox, is_attached: Callable[[], bool], timeout_s: float) -> bool:
        has_come = inbox.handle_one(timeout_s)
        if not is_attached():
            raise PeerError("the attention worker went away")
        return has_come
