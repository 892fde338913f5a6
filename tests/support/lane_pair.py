"""Both workers' engines in one process, each with its thread, over shared memory and without gRPC."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from services.attn_worker.attachment import Attachment as AttentionSide
from services.attn_worker.build import StepLimits, build_engine
from services.attn_worker.cache.cached_sequence import OpenResult
from services.attn_worker.kv_events.kv_events import KVEvents
from services.attn_worker.metrics import AttentionMetrics
from services.attn_worker.servicer import describe_accepted, describe_opened
from services.channel.shm import ShmChannel
from services.common.config import Config
from services.common.kv_cache.scales import KVScales
from services.common.sampling_params import SamplingParams
from services.dense_worker.build import load_model, resolve_dense_model
from services.dense_worker.engine.attachment import Attachment, AttachmentEnd
from services.dense_worker.engine.engine import Engine
from services.dense_worker.engine.step_report import StepReport
from services.dense_worker.service import attach_options, scheduler_limits
from services.step import NewSequence, StepPlan
from tests.support.dense.sequences import new_sequence

EPOCH, TIMEOUT_S = 0x5EA1_ED5E_0000_0018, 120.0


class LanePair:
    """Implements `AttentionPort`: passes plans to the attention engine, and its answers back."""

    def __init__(self, config: Config, kv_events: KVEvents | None) -> None:
        resolved = resolve_dense_model(config)
        self.model = load_model(config, resolved, lambda line: None)
        scheduler, options = config.scheduler, attach_options(config, self.model)
        limits = StepLimits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.num_lanes)
        metrics = AttentionMetrics(CollectorRegistry(), lambda: None)
        self.attention = build_engine(config.attention, resolved, limits, metrics, events=kv_events)
        self.reports: queue.Queue[StepReport] = queue.Queue()
        self.failures: list[object] = []
        spec, own = options.spec, dict[int, ShmChannel]()
        for lane in range(scheduler.num_lanes):
            own[lane] = ShmChannel.create(spec, EPOCH, 1, lane, TIMEOUT_S)
        channels = {lane: ShmChannel.map(each.handle, spec, EPOCH, 1, TIMEOUT_S) for lane, each in own.items()}
        self.side = AttentionSide(1, own, spec.max_tokens)
        self.side.fail = self.failures.append
        learned = replace(options.learned, scales=KVScales.ones(resolved.config.num_layers))
        self.attention.submit(self.attention.attach, self.side, "00", learned).result(TIMEOUT_S)
        self.engine = Engine(
            scheduler_limits(config, resolved), self.model.runner, self, self.reports.put, TIMEOUT_S,
            features=self.model.features,
        )
        self.engine.failure.add_done_callback(lambda failure: self.reports.put(StepReport(-1)))
        self.engine.start()
        cache = self.attention.cache
        counts = (cache.block_size, cache.num_blocks, cache.num_free_blocks, {}, cache.max_model_len)
        kept = (cache.sliding_window.window, cache.sliding_window.num_sink_tokens, cache.uncounted_window)
        self.engine.on_attached(Attachment(EPOCH, 1, channels, *counts, *kept))

    def ready(self, attachment: Attachment) -> None: ...

    def publish(self, attachment: Attachment, plan: StepPlan) -> None:
        for new in plan.new_sequences:
            self._open(attachment, new)
        if not plan.is_step:
            return

        def accept(accepted: Any) -> None:
            if accepted.plan.frees_blocks or accepted.step.errors:
                self.engine.on_answer(attachment, describe_accepted(accepted))

        self.attention.submit(self.attention.run_step, self.side, plan, 0.0, accept)

    def _open(self, attachment: Attachment, new: NewSequence) -> None:
        opened: Future[OpenResult] = Future()
        opened.add_done_callback(
            lambda call: self.engine.on_answer(attachment, describe_opened(new.seq_id, call.result()))
        )
        self.attention.submit(self.attention.open_sequence, self.side, new, opened)

    def drop(self, attachment: Attachment, end: AttachmentEnd) -> None:
        self.failures.append(end)
        self.reports.put(StepReport(-1))

    def generate(self, prompts: Mapping[int, list[int]], max_tokens: int) -> dict[int, list[int]]:
        """The greedy tokens after each prompt, by seq_id; all run at once."""
        sampling = SamplingParams(temperature=0)
        for seq_id, prompt in prompts.items():
            self.engine.submit(new_sequence(seq_id, f"r{seq_id}", prompt, sampling, max_tokens=max_tokens))
        found: dict[int, list[int]] = {seq_id: [] for seq_id in prompts}
        while any(len(tokens) < max_tokens for tokens in found.values()):
            report = self.reports.get(timeout=TIMEOUT_S)
            assert report.step_id >= 0 and not self.failures, self.failures
            for output in report.outputs:
                assert output.error is None, output.error
                found[output.sequence.seq_id] += output.token_ids
        return found

    def close(self) -> None:
        """Ends both engines."""
        self.engine.stop(TIMEOUT_S)
        self.side.abort()
        self.attention.stop(TIMEOUT_S)
        for feature in self.model.features:
            feature.close()


@contextlib.contextmanager
def lane_pair(config: Config, kv_events: KVEvents | None = None) -> Iterator[LanePair]:
    """Two engines, and at the end a check that all blocks are counted."""
    pair = LanePair(config, kv_events)
    try:
        yield pair
        pair.attention.submit(pair.attention.cache.check_integrity).result(TIMEOUT_S)
    finally:
        pair.close()
