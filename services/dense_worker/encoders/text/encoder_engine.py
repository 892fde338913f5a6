"""`EncoderEngine`: the engine thread of a dense worker that serves an encoder. There is no attention worker.

    admit → choose whole inputs → run all layers → pool → report

A step takes waiting inputs by clients in turns, as many as fit into its budget of tokens. An input that is longer than
the budget runs beside the steps, one layer after each, so that it delays nobody by more than a layer takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from services.common.engine_thread import IDLE_POLL_S
from services.common.errors import InvalidRequest, TwostrokeError
from services.common.pooling.pooling_config import PoolingMethod, TokenHead
from services.dense_worker.encoders.text.pooled_text import PooledText
from services.dense_worker.encoders.text.text_encoder import EncoderRun, TextEncoder
from services.dense_worker.engine.gateway_engine import GatewayEngine
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.observer import EngineCounts, EngineObserver, StepStats
from services.dense_worker.engine.sequence import (
    AFTER_SUSPECT_S,
    FinishReason,
    Sequence,
    SequenceOutput,
    SequenceStatus,
)
from services.dense_worker.engine.step_report import StepOutputs, StepReport, record_started
from services.dense_worker.engine.waiting_queue import WaitingQueue
from services.dense_worker.features.report import TokenReport
from services.dense_worker.features.token_rows import to_host
from services.dense_worker.sampling.upload import upload
from services.rpc.watchdog import Progress


@dataclass(slots=True)
class _Step:
    """Inputs that run together."""

    sequences: list[Sequence]
    run: EncoderRun
    step_id: int
    begin_s: float
    # The indexes of sequences of which the same is made, and what is made of them, float32 [num_rows, size] on the host
    # once `event` has passed: a row for each, or one for each of their tokens.
    values: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)
    event: torch.cuda.Event | None = None  # the end of the step on a GPU

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for any of them."""
        return any(each.status is not SequenceStatus.FINISHED for each in self.sequences)


class EncoderEngine(GatewayEngine):
    """Its sequences are inputs, which have no blocks: none outlives the worker that it was sent to.

    `deliver` receives every `StepReport` on the engine thread and must not block.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        method: PoolingMethod,
        limits: SchedulerLimits,
        deliver: Callable[[StepReport], None],
        observers: SequenceOf[EngineObserver] = (),
        on_left: Callable[[], None] = lambda: None,
    ) -> None:
        """on_left: called on the engine thread when it was asked to leave, and no step runs any more"""
        super().__init__()
        self._encoder, self._method, self._limits = encoder, method, limits
        self._deliver, self._observers, self._on_left = deliver, tuple(observers), on_left
        self._waiting = WaitingQueue(limits.max_num_waiting, limits.max_num_waiting_tokens, limits.priority_ageing_s)
        self._sequences: dict[int, Sequence] = {}  # all live ones
        self._long: _Step | None = None  # of the one input that is longer than a step
        self._launched: _Step | None = None  # on a GPU: enqueued, and not yet reported
        self._num_steps = self._num_layers = self._num_running = 0

    @property
    def counts(self) -> EngineCounts:
        return EngineCounts(len(self._waiting), 0, self._num_running, self._num_steps, 0, is_attached=False)

    def progress(self) -> Progress | None:
        """The progress for the watchdog; None without work. May be called from any thread."""
        if not self._num_running:
            return None
        return Progress((self._num_steps, self._num_layers), self._num_steps)

    def _leave(self) -> None:
        self._collect()
        self._on_left()

    def _add(self, sequence: Sequence) -> None:
        try:
            most = self._limits.max_model_len
            if sequence.num_prompt_tokens > most:
                raise InvalidRequest(f"the input has {sequence.num_prompt_tokens} tokens, the model takes {most}")
            self._waiting.admit(sequence)
        except TwostrokeError as error:
            self._deliver_end(sequence, error)
            return
        self._sequences[sequence.seq_id] = sequence
        self._waiting.push(sequence)

    def _cancel(self, seq_id: int) -> None:
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Forgets a live sequence. A step that runs it goes on for the others."""
        status, sequence.status = sequence.status, SequenceStatus.FINISHED
        del self._sequences[sequence.seq_id]
        if status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        else:
            self._num_running -= 1
        self._waiting.forget(sequence)

    def _deliver_end(self, sequence: Sequence, error: TwostrokeError) -> None:
        self._deliver(StepReport.between_steps([SequenceOutput.failed(sequence, error)]))

    @torch.inference_mode()
    def _work(self) -> float:
        for sequence, error in self._waiting.expired(time.monotonic()):
            self._end(sequence)
            self._deliver_end(sequence, error)
        chosen = [] if self._drains else self._choose()
        if chosen:
            step = self._begin(chosen)
            if step.run.num_tokens > self._limits.max_num_batched_tokens:
                self._long = step
            else:
                self._run(step)
        elif self._launched is not None:
            self._collect()
        if self._long is not None:
            self._advance_long(self._long)
        return 0.0 if self._long is not None or self._launched is not None or len(self._waiting) else IDLE_POLL_S

    def _choose(self) -> list[Sequence]:
        """The inputs of the next step, in the order of their clients' turns. A suspect of crashes runs alone."""
        chosen, num_tokens, limits = list[Sequence](), 0, self._limits
        while len(chosen) < limits.max_num_seqs and (sequence := self._next(limits.max_num_batched_tokens)) is not None:
            num_tokens += sequence.num_prompt_tokens
            is_alone = sequence.is_suspect or sequence.num_prompt_tokens > limits.max_num_batched_tokens
            if chosen and (is_alone or num_tokens > limits.max_num_batched_tokens):
                break
            self._waiting.choose(sequence)
            sequence.status = SequenceStatus.RUNNING
            self._num_running += 1
            chosen.append(sequence)
            if is_alone:
                break
        return chosen

    def _next(self, max_num_tokens: int) -> Sequence | None:
        """Whose turn is next; a long one only if no other long one runs."""
        for sequence in self._waiting.heads(()):
            if self._long is None or sequence.num_prompt_tokens <= max_num_tokens:
                return sequence
        return None

    def _begin(self, sequences: list[Sequence]) -> _Step:
        # Tells the gateways now, so that they know it before any step runs these inputs.
        self._deliver(StepReport(0, admitted=sequences))
        if sequences[0].is_suspect:
            self._collect()
            time.sleep(AFTER_SUSPECT_S)
        self._num_steps += 1
        begin_s = time.monotonic()
        segments = [_pooled_text(each).second_segment for each in sequences]
        run = EncoderRun(self._encoder, [each.spec.prompt_token_ids for each in sequences], segments)
        return _Step(sequences, run, self._num_steps, begin_s)

    def _run(self, step: _Step) -> None:
        """Runs or enqueues all layers. On a GPU the step before is reported meanwhile."""
        while not step.run.is_done and step.is_wanted:
            self._advance(step)
        if not step.run.is_done:
            return
        self._pool(step)
        before, self._launched = self._launched, step
        if before is not None:
            self._report(before)
        if step.event is None:
            self._collect()

    def _advance(self, step: _Step) -> None:
        step.run.advance()
        self._num_layers += 1
        if step.event is None and self._encoder.device.type == "cpu":
            while self._thread.make_call(0.0):  # a cancel may come, and new inputs
                pass

    def _advance_long(self, step: _Step) -> None:
        """One layer of the input that is longer than a step."""
        if not step.is_wanted:
            self._long = None
            return
        self._advance(step)
        if step.run.is_done:
            self._long = None
            self._pool(step)
            self._report(step)

    def _pool(self, step: _Step) -> None:
        groups: dict[tuple[bool, TokenHead | None], list[int]] = {}
        for index, sequence in enumerate(step.sequences):
            groups.setdefault((self._has_each_token(sequence), _pooled_text(sequence).token_head), []).append(index)
        for (has_each, head), indexes in groups.items():
            if has_each:
                values = step.run.tokens(indexes, head)
            else:
                pooled = step.run.pool(self._method)
                is_whole = len(indexes) == len(step.sequences)
                values = pooled if is_whole else pooled[upload(np.array(indexes), pooled.device)]
            step.values.append((indexes, to_host(values)))
        if values.device.type == "cuda":
            step.event = torch.cuda.Event()
            step.event.record()

    def _collect(self) -> None:
        """Reports the launched step, if there is one."""
        step, self._launched = self._launched, None
        if step is not None:
            self._report(step)

    def _report(self, step: _Step) -> None:
        if step.event is not None:
            step.event.synchronize()
        now_s, rows = time.monotonic(), self._rows_of(step)
        started = record_started(step.sequences, step.begin_s)
        reports, outputs = list[tuple[Sequence, TokenReport]](), list[SequenceOutput]()
        for index, sequence in enumerate(step.sequences):
            if sequence.status is not SequenceStatus.FINISHED:
                report = TokenReport(sequence.seq_id, PooledText.name, 0, rows[index])
                reports.append((sequence, report))
                outputs.append(SequenceOutput(sequence, (), FinishReason.LENGTH))
                sequence.first_token_s = now_s
                self._end(sequence)
        self._deliver(StepReport(step.step_id, started, StepOutputs(others=outputs), reports=reports))
        self._observe(step, started, outputs, now_s)

    def _rows_of(self, step: _Step) -> list[np.ndarray]:
        """The rows that each sequence of a step reports: float32 [n, size]."""
        rows = dict[int, np.ndarray]()
        for indexes, values in step.values:
            has_each = [self._has_each_token(step.sequences[index]) for index in indexes]
            lengths = [step.run.lengths[index] if each else 1 for index, each in zip(indexes, has_each, strict=True)]
            rows |= dict(zip(indexes, np.split(values.numpy(), np.cumsum(lengths)[:-1]), strict=True))
        return [rows[index] for index in range(len(step.sequences))]

    def _has_each_token(self, sequence: Sequence) -> bool:
        """Whether a vector is made of each token of it."""
        return self._method is PoolingMethod.ALL or _pooled_text(sequence).all_tokens

    def _observe(
        self, step: _Step, started: Iterable[Sequence], outputs: Iterable[SequenceOutput], now_s: float
    ) -> None:
        stats = StepStats(
            step_id=step.step_id,
            num_seqs=len(step.sequences),
            num_tokens=step.run.num_tokens,
            num_sampled=0,
            num_output_tokens=0,
            num_running=self._num_running,
            num_waiting=len(self._waiting),
            num_preemptions=0,
            num_blocks=0,
            num_free_blocks=0,
            num_reserved_blocks=0,
            gap_s=0.0,
            launch_s=0.0,
            duration_s=now_s - step.begin_s,
            wait_s=None,
        )
        for observer in self._observers:
            observer.on_step(stats, started, outputs)


def _pooled_text(sequence: Sequence) -> PooledText:
    [pooled] = sequence.features
    assert isinstance(pooled, PooledText), "of every sequence a vector is made"
    return pooled
