"""`AttentionEngine`: the attention worker's one engine thread. It owns the KV cache and the backend.

    plan_step → accepted → (wait qkv → rope, append, attend → signal) per layer → commit_step

Calls queue up in order. On a CPU a launched step is done; a GPU may still run one when the next is launched.
A step that loses its dense worker is rolled back as if it had never been planned.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from services.attn_worker.cache.kv_cache import KVCache, OpenResult, PlannedStep
from services.attn_worker.metrics import AttentionMetrics
from services.attn_worker.runner.layer_runner import FinishedStep, LayerRunner, RunningStep
from services.channel import Channel
from services.common.errors import StaleEpoch
from services.rpc.watchdog import Progress
from services.step import NewSequence, StepPlan

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a plan did to the cache, known before its layers run."""

    plan: StepPlan
    step: PlannedStep
    num_free_blocks: int


class AttentionEngine:
    """All work goes through `submit`, in order; counters may be read from any thread."""

    def __init__(self, cache: KVCache, runner: LayerRunner, metrics: AttentionMetrics) -> None:
        self.cache = cache
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self._runner = runner
        self._metrics = metrics
        self._running: deque[tuple[RunningStep, int]] = deque()  # oldest first, with their numbers of tokens
        self._channel: Channel | None = None
        self._attachment_id = 0
        self._current: StepPlan | None = None  # whose layers are being run, or launched
        self._request_ids: dict[int, str] = {}  # of open sequences, for messages
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    def submit(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> Future[R]:
        """Runs one of the methods below on the engine thread, after everything submitted before."""
        return self._executor.submit(function, *arguments, **keywords)

    def progress(self, num_layers: int) -> Progress | None:
        """For the watchdog, from any thread; None without a step."""
        plan, channel = self._current, self._channel
        if plan is None or channel is None:
            return None
        return Progress(
            counter=(self._attachment_id, self.num_steps, plan.step_id, channel.num_waits or 0),
            step_id=plan.step_id,
            layer=None if channel.num_waits is None else channel.num_waits % num_layers,
            request_ids=tuple(self._request_ids.get(seq_id, f"{seq_id:x}") for seq_id, *_ in plan.entries),
            waits_for="dense_worker" if channel.is_waiting else "",
        )

    def stop(self) -> None:
        """Ends the thread after the call it is in; whoever waits in a channel must have been aborted."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        if self._channel is not None:
            self._channel.close()

    def detach(self) -> None:
        """Ends an attachment whose channel has been aborted: closes that, and rolls back steps that have not ended."""
        self._abort_steps()
        channel, self._channel, self._attachment_id = self._channel, None, 0
        if channel is not None:
            channel.close()

    def attach(self, channel: Channel, attachment_id: int, weights_hash: str) -> None:
        """Takes a new attachment's channel, owned by the engine from now on, in place of the last one's.

        Keys and values of other weights than `weights_hash` are dropped.
        """
        self.detach()
        self.cache.use_weights(bytes.fromhex(weights_hash))
        self._channel, self._attachment_id = channel, attachment_id
        held = self.cache.held_blocks
        self._request_ids = {seq_id: name for seq_id, name in self._request_ids.items() if seq_id in held}
        self._runner.attach(channel)

    def open_sequence(self, attachment_id: int, new: NewSequence) -> OpenResult:
        """See `KVCache.open_sequence`. Raises `StaleEpoch` for an attachment that was replaced."""
        self._check_attachment(attachment_id)
        self._commit_done()
        result = self.cache.open_sequence(
            new.seq_id,
            new.token_ids,
            new.num_prompt_tokens,
            new.cache_salt.encode(),
            ignores_prefix_cache=new.num_prompt_logprobs is not None,
        )
        self.num_cached_tokens += result.num_cached_tokens
        self._request_ids[new.seq_id] = new.request_id
        return result

    def run_step(
        self, attachment_id: int, plan: StepPlan, received_s: float, on_accepted: Callable[[Accepted], None]
    ) -> None:
        """Launches one step, whose plan came at `received_s` by `time.perf_counter`.

        Raises what `Channel.wait` raises, with all unfinished steps rolled back.
        """
        self._check_attachment(attachment_id)
        start_s = time.perf_counter()
        self._metrics.on_plan(start_s - received_s)
        self._commit_done()
        step = self.cache.plan_step(plan)
        if step.errors and self._channel is not None:
            self._channel.add_errors(len(step.errors))
        on_accepted(Accepted(plan, step, self.cache.num_free_blocks))
        for seq_id in plan.close_seq_ids:
            self._request_ids.pop(seq_id, None)
        for fork in plan.forks:
            self._request_ids[fork.child_seq_id] = self._request_ids.get(fork.parent_seq_id, "")
        self._current = plan if plan.entries else None
        try:
            if step.block_copies:
                self._runner.copy_blocks(step.block_copies)
            running = self._launch(step, start_s) if plan.entries else FinishedStep()
            self._running.append((running, len(step.metadata.positions)))
            self._commit_done()
        except BaseException:
            self._abort_steps()
            raise
        finally:
            self._current = None

    def _launch(self, step: PlannedStep, start_s: float) -> RunningStep:
        channel = self._channel
        assert channel is not None, "steps need an attachment"
        waited_s = channel.waited_s
        running = self._runner.launch(step.metadata)
        if waited_s is not None and channel.waited_s is not None:  # the step has run, on a CPU
            self._metrics.on_step(time.perf_counter() - start_s, channel.waited_s - waited_s)
        return running

    def _commit_done(self) -> None:
        """Keeps the tokens of every step that has ended, in order."""
        while self._running and self._running[0][0].is_done():
            _, num_tokens = self._running.popleft()
            self.cache.commit_step()
            self.num_steps += 1
            self.num_computed_tokens += num_tokens

    def _abort_steps(self) -> None:
        self._running.clear()
        self.cache.abort_steps()

    def _check_attachment(self, attachment_id: int) -> None:
        if attachment_id != self._attachment_id:
            raise StaleEpoch(f"attachment {attachment_id} was replaced by attachment {self._attachment_id}")
