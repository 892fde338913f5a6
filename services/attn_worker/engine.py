"""`AttentionEngine`: the attention worker's one engine thread. It owns the KV cache and the backend.

    open_sequence → opened
    plan_step → accepted → (wait qkv → rope, append, attend → signal) per layer → commit_step

Calls are made in order. On a CPU a launched step is done; a GPU may still run a step when the next is launched. With
several lanes the thread runs their steps by turns, between calls; plans change the cache in the order of arrival.
If the dense worker is lost during a step, the step is rolled back as if it had never been planned. Steps go on while
blocks of a sequence that is being opened come from elsewhere (`Openings`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, TypeVar

import structlog

from services.attn_worker.attachment import Attachment
from services.attn_worker.cache.cached_sequence import OpenResult, PlannedStep
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.metrics import AttentionMetrics
from services.attn_worker.moved_blocks import MovedBlocks
from services.attn_worker.openings import AnswerOpening, Openings
from services.attn_worker.rehearsal import Rehearsal
from services.attn_worker.runner.layer_runner import FinishedStep, LayerRunner, RunningStep
from services.channel import Channel
from services.common.attention.learned import Learned
from services.common.engine_thread import EngineThread
from services.common.errors import StaleEpoch
from services.rpc.watchdog import Progress
from services.step import NewSequence, PlanAccepted, StepPlan

log = structlog.get_logger()

R = TypeVar("R")

_TIER_TIMEOUT_S = 1.0  # to copy what has been offered to a tier when the worker ends


class AttentionEngine:
    """Call `start`, then give all work to `submit`, which runs it in order, finally `stop`.

    Counters may be read from any thread. `failure` holds the error that ended the thread, if one did.
    """

    def __init__(
        self,
        cache: KVCache,
        runner: LayerRunner,
        metrics: AttentionMetrics,
        moved_blocks: MovedBlocks | None = None,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        """`moved_blocks`: None if sequences that move are computed again. `rehearsal`: None if steps are not rehearsed.
        """
        self.cache = cache
        self.rehearsal = rehearsal
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_loaded_tokens = 0  # of these, those whose blocks came from the tier
        self.num_copied_tokens = 0  # and those whose blocks came from another attention worker
        self.moved_blocks = moved_blocks
        self._runner = runner
        self._metrics = metrics
        self._attachment: Attachment | None = None
        self._thread = EngineThread(self._work)
        self.failure = self._thread.failure
        receiver = None if moved_blocks is None else moved_blocks.receiver
        self._openings = Openings(cache, runner, self._thread.submit, self._note_opened, receiver)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, function: Callable[..., R], *arguments: Any) -> Future[R]:
        """Runs one of the methods below on the engine thread, after everything submitted before."""
        return self._thread.submit(function, *arguments)

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Like `submit`, for what raises nothing."""
        self._thread.post(function, *arguments)

    def read(self, file: int, on_readable: Callable[[], bool]) -> None:
        """Has the thread call `on_readable` whenever a file has something to read, until it returns False."""
        self._thread.post(self._thread.read, file, on_readable)

    def progress(self, num_layers: int) -> Progress | None:
        """The progress for the watchdog; None without a step. May be called from any thread."""
        attachment = self._attachment
        return attachment and attachment.progress(self.num_steps, num_layers)

    def stop(self, timeout_s: float) -> None:
        """Ends the thread after its current call and closes the attachment, which must have been aborted.

        Blocks up to `timeout_s` seconds. If the thread has not ended by then, everything it uses stays open. Otherwise
        everything is closed, also if the device has failed, whose error is raised then.
        """
        if not self._thread.stop(timeout_s):
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self.cache.tier.close, _TIER_TIMEOUT_S)
            if self.moved_blocks is not None:
                stack.callback(self.moved_blocks.close)
            if self._attachment is not None:
                stack.callback(self._attachment.close)
            stack.callback(self._openings.cancel_all)

    def detach(self) -> None:
        """Drops an aborted attachment: closes it and rolls back unfinished steps."""
        attachment, self._attachment = self._attachment, None
        self._openings.cancel_all()
        self._roll_back(attachment)
        if attachment is not None:
            attachment.close()

    def attach(self, attachment: Attachment, weights_hash: str, learned: Learned) -> None:
        """Replaces the last attachment by a new one, which the engine owns from now on.

        Keys and values computed with weights other than `weights_hash`, or stored with other scales, are dropped.
        """
        self.detach()
        self._attachment = attachment
        assert learned.scales is not None, "a request without scales has 1 for each layer"
        self.cache.use_weights(bytes.fromhex(weights_hash) + learned.scales.identity)
        self._runner.attach(attachment.channels.values(), learned)

    def open_sequence(self, attachment: Attachment, new: NewSequence, answer: AnswerOpening) -> None:
        """Opens a sequence in the KV cache. `answer` gets the result, which may come between later steps.

        Raises `StaleEpoch` if the attachment was replaced, and InvalidRequest for impossible lengths.
        """
        self._check_attachment(attachment)
        self._commit_done(attachment)
        self._openings.open(new, answer)
        attachment.request_ids[new.seq_id] = new.request_id

    def _note_opened(self, result: OpenResult) -> None:
        self.num_cached_tokens += result.num_cached_tokens
        self.num_copied_tokens += result.num_copied_blocks * self.cache.block_size
        if not result.num_copied_blocks:
            self.num_loaded_tokens += len(result.missing) * self.cache.block_size

    def rehearse(self, attachment: Attachment, plan: StepPlan) -> None:
        """Rehearses an old plan, if nobody has a sequence and no step is under way; after an error no more."""
        is_current = attachment is self._attachment and len(attachment.channels) == 1
        if self.rehearsal is None or not is_current or attachment.request_ids:
            return
        self._commit_done(attachment)
        if attachment.running:
            return
        try:
            self.rehearsal.run(plan, attachment.channels[plan.lane])
        except Exception as error:  # of a bug, which all others would have, too: serving does not need them
            log.error("rehearsing has failed and ends", exc_info=error)
            self.rehearsal = None

    def run_step(
        self, attachment: Attachment, plan: StepPlan, received_s: float, on_accepted: Callable[[PlanAccepted], None]
    ) -> None:
        """Launches one step on its lane's channel; its plan arrived at `received_s` on `time.perf_counter`.

        `on_accepted` gets what the plan does to the cache, before its layers run, if it frees blocks or has errors.

        Raises the errors of `Channel.wait`; all unfinished steps are then rolled back.
        """
        self._check_attachment(attachment)
        start_s = time.perf_counter()
        self._commit_done(attachment)
        channel, request_ids = attachment.channels[plan.lane], attachment.request_ids
        step = self.cache.plan_step(plan)
        if step.errors:
            channel.add_errors(len(step.errors))
        frees_blocks = plan.frees_blocks
        if frees_blocks or step.errors:
            errors = {seq_id: str(error) for seq_id, error in step.errors.items()}
            on_accepted(PlanAccepted(plan.step_id, step.num_freed_blocks, self.cache.num_free_blocks, errors))
        for seq_id in plan.close_seq_ids:
            request_ids.pop(seq_id, None)
        for fork in plan.forks:
            request_ids[fork.child_seq_id] = request_ids.get(fork.parent_seq_id, "")
        attachment.launching = plan if plan.entries else None
        before = attachment.before_reuse
        if frees_blocks:
            attachment.before_reuse = tuple(running for running, _ in attachment.running)
        try:
            if any(step.block_copies):
                self._runner.copy_blocks(step.block_copies)
            running = self._launch(step, channel, start_s, before) if plan.entries else FinishedStep()
            attachment.running.append((running, plan))
            self._metrics.on_plan(start_s - received_s)
            self._commit_done(attachment)
        except BaseException:
            self._roll_back(attachment)
            raise
        finally:
            attachment.launching = None

    def _work(self) -> float | None:
        """Goes on with the steps of several lanes, or uses an idle moment. Returns how long to wait for a call; None:
        until one comes.
        """
        attachment = self._attachment
        if attachment is None:
            return None
        try:
            if len(attachment.channels) == 1:
                is_idle = not attachment.request_ids  # nobody has a sequence, which would wait
                return 0.0 if is_idle and self._runner.capture_ahead() else None
            is_any_left = self._runner.advance()
            self._commit_done(attachment)
        except Exception as error:
            self._roll_back(attachment)
            attachment.fail(error)
            return None
        attachment.launching = attachment.running[0][1] if is_any_left else None
        return 0.0 if is_any_left else None

    def _launch(
        self, step: PlannedStep, channel: Channel, start_s: float, before: Collection[RunningStep]
    ) -> RunningStep:
        waited_s = channel.waited_s
        running = self._runner.launch(step.metadata, channel, before)
        has_run = isinstance(running, FinishedStep)  # on a CPU
        if has_run and waited_s is not None and channel.waited_s is not None:
            self._metrics.on_step(time.perf_counter() - start_s, channel.waited_s - waited_s)
        return running

    def _commit_done(self, attachment: Attachment) -> None:
        """Commits all steps that have ended, in order."""
        while attachment.running and attachment.running[0][0].is_done():
            _, plan = attachment.running.popleft()
            self.cache.commit_step()
            self.num_steps += 1
            self.num_computed_tokens += plan.num_tokens

    def _roll_back(self, attachment: Attachment | None) -> None:
        """Undoes all steps that are not committed."""
        if attachment is not None:
            attachment.drop_steps()
        self.cache.abort_steps()

    def _check_attachment(self, attachment: Attachment) -> None:
        if attachment is not self._attachment:
            raise StaleEpoch(f"attachment {attachment.attachment_id} has been replaced")
