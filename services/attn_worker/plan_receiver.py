"""`PlanReceiver`: passes plans, and the sequences that they open, to the engine, and the engine's answers on.

On the event loop, or, if plans come by a link, on the engine thread, which calls what reports in any case.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from services.attn_worker.attachment import Attachment
from services.attn_worker.cache.cached_sequence import OpenResult
from services.attn_worker.engine import AttentionEngine
from services.common.errors import CapacityError, InvalidRequest
from services.pb import attn_pb2, step_pb2
from services.rpc.spans import Span, Tracer
from services.step import NewSequence, PlanAccepted, SequenceOpened, StepPlan
from services.step.codec import decode_plan, encode_accepted, encode_opened

# Takes an answer to send, or an error that ends the stream of plans. May be called from any thread.
PutAnswer: TypeAlias = Callable[[attn_pb2.PlanAnswer | Exception], None]


class PlanReceiver:
    """Of one attachment, for plans that come, and are answered, one way."""

    def __init__(
        self,
        engine: AttentionEngine,
        attachment: Attachment,
        max_num_seqs: int,
        tracer: Tracer,
        put: PutAnswer,
    ) -> None:
        """max_num_seqs: of a step"""
        self._engine = engine
        self._attachment = attachment
        self._max_num_seqs = max_num_seqs
        self._tracer = tracer
        self._put = put

    def receive(self, message: step_pb2.StepPlan) -> None:
        """Passes a plan to the engine thread. Raises `InvalidRequest`, which ends the stream."""
        plan, received_s = self._read(message), time.perf_counter()
        self._engine.post(self._run, plan, received_s)  # all of it at once: the thread wakes once

    def run(self, message: step_pb2.StepPlan, received_s: float) -> StepPlan:
        """The same on the engine thread, of a plan that was sent at `received_s`. Returns the plan."""
        plan = self._read(message)
        self._run(plan, received_s)
        return plan

    def _read(self, message: step_pb2.StepPlan) -> StepPlan:
        plan = decode_plan(message)
        self._check(plan)
        return plan

    def _check(self, plan: StepPlan) -> None:
        lanes, max_num_tokens = list(self._attachment.channels), self._attachment.max_num_tokens
        if plan.lane not in lanes:
            raise InvalidRequest(f"plan {plan.step_id} is of lane {plan.lane}, the attachment has lanes {lanes}")
        limits = ((plan.num_tokens, max_num_tokens, "tokens"), (len(plan.entries), self._max_num_seqs, "sequences"))
        for count, limit, what in limits:
            if count > limit:
                raise InvalidRequest(f"plan {plan.step_id} has {count} {what}, the limit is {limit}")

    def _run(self, plan: StepPlan, received_s: float) -> None:
        for new in plan.new_sequences:
            self._open(new)
        if not plan.is_step:
            return
        try:
            self._engine.run_step(self._attachment, plan, received_s, self._accept)
        except Exception as error:  # of this attachment, not of the thread
            self._put(error)

    def _accept(self, accepted: PlanAccepted) -> None:
        self._put(encode_accepted(accepted))

    def _open(self, new: NewSequence) -> None:
        """The answer may come later, or an error that ends the stream."""
        span = self._tracer.start("open_sequence", new.traceparent, request_id=new.request_id)
        answer = partial(self._answer, new, span)
        try:
            self._engine.open_sequence(self._attachment, new, answer)
        except Exception as error:
            answer(error)

    def _answer(self, new: NewSequence, span: Span, opened: OpenResult | Exception | None) -> None:
        if opened is None:
            span.end("the attention worker was stopped, or the dense worker was lost")
        elif isinstance(opened, OpenResult):
            span.end(num_cached_tokens=opened.num_cached_tokens, num_held_blocks=opened.num_held_blocks)
            if not new.starts_empty:
                self._put(encode_opened(opened))
        else:
            span.end(str(opened))
            if isinstance(opened, InvalidRequest | CapacityError):  # fails only this sequence, not the stream
                self._put(encode_opened(SequenceOpened(new.seq_id, error=str(opened))))
            else:
                self._put(opened)
