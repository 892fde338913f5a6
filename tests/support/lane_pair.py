"""Both workers' engines in one process, each with its thread, over shared memory and without gRPC."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from services.attn_worker.attachment import Attachment as AttentionAttachment
from services.attn_worker.build import AttentionSetup, build_engine
from services.attn_worker.cache.cached_sequence import OpenResult
from services.attn_worker.cache.make_spec import StepLimits
from services.attn_worker.kv_events.kv_events import KVEvents
from services.attn_worker.metrics import AttentionMetrics
from services.channel.shm import ShmChannel
from services.common.config import Config
from services.common.kv_cache.scales import KVScales
from services.common.rank import Rank, seam_config
from services.common.resolve import ResolvedModel
from services.common.sampling_params import SamplingParams
from services.dense_worker.build import load_model, resolve_dense_model
from services.dense_worker.engine.attachment import AttachedCache, Attachment, AttachmentEnd
from services.dense_worker.engine.attention_client import AttachOptions
from services.dense_worker.engine.engine import Engine
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.step_report import StepReport
from services.dense_worker.service import attach_options, scheduler_limits
from services.step import NewSequence, PlanAccepted, SequenceOpened, StepPlan
from tests.support.attention.open_now import fulfilling
from tests.support.clients.steady_stream import wait_until
from tests.support.dense.sequences import new_sequence
from tests.support.reference import random_prompts, reference_tokens

EPOCH, TIMEOUT_S = 0x5EA1_ED5E_0000_0018, 120.0
NUM_TOKENS = 24  # of an answer
_attachment_ids = itertools.count(1)


class AttentionSide:
    """An attention worker's engine, attached, with both ends of its lanes."""

    def __init__(
        self, config: Config, model: ResolvedModel, options: AttachOptions, kv_events: KVEvents | None = None
    ) -> None:
        """`model`: with the layers of one rank"""
        scheduler, spec = config.scheduler, options.spec
        limits = StepLimits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.num_lanes)
        metrics = AttentionMetrics(CollectorRegistry(), lambda: None)
        self.engine = build_engine(AttentionSetup(config.attention, model, kv_events=kv_events), limits, metrics)
        self.failures: list[object] = []
        own, number = dict[int, ShmChannel](), next(_attachment_ids)
        for lane in range(scheduler.num_lanes):
            own[lane] = ShmChannel.create(spec, EPOCH, number, lane, TIMEOUT_S)
        shared = EPOCH, number, TIMEOUT_S
        self.channels = {lane: ShmChannel.map(each.handle, spec, *shared) for lane, each in own.items()}
        self.attachment = AttentionAttachment(number, own, spec.max_tokens)
        self.attachment.fail = self.failures.append
        learned = replace(options.learned, scales=KVScales.ones(model.config.num_layers))
        self.engine.submit(self.engine.attach, self.attachment, "00", learned).result(TIMEOUT_S)

    def describe(self) -> Attachment:
        """The dense worker's end."""
        cache = self.engine.cache
        sizes = cache.block_size, (AttachedCache(0, cache.num_blocks, cache.num_free_blocks, {}),), cache.max_model_len
        kept = (cache.sliding_window.window, cache.sliding_window.num_sink_tokens, cache.uncounted_window)
        return Attachment(EPOCH, self.attachment.attachment_id, self.channels, *sizes, *kept)

    def open(self, new: NewSequence, answer: Callable[[SequenceOpened], None]) -> None:
        """Opens a sequence; `answer` is called on some thread."""
        opened: Future[OpenResult] = Future()
        opened.add_done_callback(lambda call: answer(call.result()))
        self.engine.submit(self.engine.open_sequence, self.attachment, new, fulfilling(opened))

    def run(self, plan: StepPlan, answer: Callable[[PlanAccepted], None]) -> None:
        """Runs a step; `answer` is called on some thread if the dense worker waits for it."""

        def accept(accepted: PlanAccepted) -> None:
            if plan.frees_blocks or accepted.errors:
                answer(accepted)

        self.engine.submit(self.engine.run_step, self.attachment, plan, 0.0, accept)

    def check(self) -> None:
        """All blocks are counted."""
        self.engine.submit(self.engine.cache.check_integrity).result(TIMEOUT_S)

    def close(self) -> None:
        """Ends the engine."""
        self.attachment.abort()
        self.engine.stop(TIMEOUT_S)


class LanePair:
    """Implements `AttentionPort`: passes plans to the attention engine, and its answers back."""

    def __init__(self, config: Config, kv_events: KVEvents | None = None) -> None:
        resolved = resolve_dense_model(config, Rank.of(config.dense, 0))
        self.model = load_model(config, resolved, lambda line: None)
        self.side = self.make_side(config, 0, kv_events)
        self.sides = [self.side]
        self.attention = self.side.engine
        self.reports: queue.Queue[StepReport] = queue.Queue()
        scheduler = Scheduler(scheduler_limits(config, resolved.max_model_len), features=self.model.features)
        self.engine = Engine(scheduler, self.model.runner, self, self.reports.put, TIMEOUT_S)
        self.engine.failure.add_done_callback(lambda failure: self.reports.put(StepReport(-1)))
        self.engine.start()

    def make_side(self, config: Config, rank: int, kv_events: KVEvents | None = None) -> AttentionSide:
        """The attention worker of a rank."""
        resolved = resolve_dense_model(config, Rank.of(config.dense, rank))
        own = replace(resolved, config=seam_config(resolved.config, resolved.rank))
        return AttentionSide(config, own, attach_options(config, self.model, rank), kv_events)

    def attach(self) -> None:
        """The dense worker begins."""
        self.engine.on_attached(self.side.describe())

    def ready(self, attachment: Attachment) -> None: ...

    def publish(self, attachment: Attachment, plan: StepPlan) -> None:
        answer = partial(self.engine.on_answer, attachment)
        for new in plan.new_sequences:
            self.side.open(new, answer)
        if plan.is_step:
            self.side.run(plan, answer)

    def drop(self, attachment: Attachment, end: AttachmentEnd) -> None:
        self.side.failures.append(end)
        self.reports.put(StepReport(-1))

    def generate(self, prompts: Mapping[int, list[int]], max_tokens: int) -> dict[int, list[int]]:
        """The greedy tokens after each prompt, by seq_id; all run at once."""
        sampling = SamplingParams(temperature=0)
        for seq_id, prompt in prompts.items():
            self.engine.submit(new_sequence(seq_id, f"r{seq_id}", prompt, sampling, max_tokens=max_tokens))
        found: dict[int, list[int]] = {seq_id: [] for seq_id in prompts}
        while any(len(tokens) < max_tokens for tokens in found.values()):
            for output in self.next_report().outputs:
                assert output.error is None, output.error
                if output.sequence.seq_id in found:  # others may have been cancelled
                    found[output.sequence.seq_id] += output.token_ids
        return found

    def next_report(self) -> StepReport:
        """Waits for it. Nothing has failed."""
        report = self.reports.get(timeout=TIMEOUT_S)
        assert report.step_id >= 0 and not self.side.failures, self.side.failures
        return report

    def close(self) -> None:
        """Ends both engines."""
        self.engine.stop(TIMEOUT_S)
        self.side.close()
        for feature in self.model.features:
            feature.close()


def check_shared_prefix_and_preemption(pair: LanePair, path: Path) -> None:
    """Sequences that share a prefix, and give way to each other because blocks are few, keep Hugging Face's tokens."""
    (prefix,) = random_prompts(1, longest=40, seed=4)
    tails = random_prompts(12, longest=12, seed=5)
    prompts = {seq_id: [*prefix, *tail] for seq_id, tail in enumerate(tails, start=1)}
    expected = {seq_id: reference_tokens(path, prompt, NUM_TOKENS) for seq_id, prompt in prompts.items()}
    assert pair.generate({1: prompts.pop(1)}, NUM_TOKENS) == {1: expected.pop(1)}
    for side in pair.sides:  # the first answer has its last token before its blocks are in the prefix cache
        cache = side.engine.cache
        wait_until(lambda cache=cache: cache.num_sequences == 0, TIMEOUT_S)
    assert pair.generate(prompts, NUM_TOKENS) == expected
    assert pair.engine.counts.num_preemptions > 0
    assert all(side.engine.num_cached_tokens > 0 for side in pair.sides)


@contextlib.contextmanager
def lane_pair(config: Config, kv_events: KVEvents | None = None) -> Iterator[LanePair]:
    """Two engines, and at the end a check that all blocks are counted."""
    pair = LanePair(config, kv_events)
    pair.attach()
    try:
        yield pair
        pair.side.check()
    finally:
        pair.close()
