"""The attention worker with two lanes: their steps run beside each other, on one KV cache."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
import torch
from prometheus_client import CollectorRegistry

from services.attn_worker.attachment import Attachment
from services.attn_worker.build import AttentionSetup, build_engine
from services.attn_worker.cache.make_spec import StepLimits
from services.attn_worker.engine import AttentionEngine
from services.attn_worker.metrics import AttentionMetrics
from services.channel import ChannelAborted, ChannelSpec, ChannelTimeout, Flag, qkv_flag
from services.channel.shm import ShmChannel
from services.common.attention.learned import Learned
from services.common.config import AttentionSection, ModelSection
from services.common.kv_cache.scales import KVScales
from services.common.resolve import resolve_model
from services.step import NewSequence, PlanAccepted, PlanEntry, StepPlan
from tests.support.attention.open_now import open_now
from tests.support.plans import plan_of

EPOCH = 0x5EA1_ED5E_0000_0017
TIMEOUT_S = 60.0
BLOCK_SIZE, MAX_NUM_TOKENS = 4, 16
MODEL = resolve_model(ModelSection(), "cpu")
CONFIG = MODEL.config
SPEC = ChannelSpec(MAX_NUM_TOKENS, CONFIG.qkv_size, CONFIG.attn_size, torch.float32)
_attachment_ids = itertools.count(1)


class DenseLane:
    """The dense worker's end of a lane. It sends random queries, keys and values of a seed for each step."""

    def __init__(self, channel: ShmChannel) -> None:
        self.channel = channel
        self._layers: Iterator[torch.Tensor] = iter(())
        self._num_tokens = 0
        self.outputs: list[torch.Tensor] = []

    def begin(self, seed: int, num_tokens: int) -> None:
        """Begins a step: sends the rows of its first layer."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(CONFIG.num_layers, num_tokens, CONFIG.qkv_size, generator=generator)
        self._layers, self._num_tokens, self.outputs = iter(rows), num_tokens, []
        self._send()

    def go_on(self, num_layers: int = CONFIG.num_layers) -> list[torch.Tensor]:
        """Receives the rest of the layers, or so many, each before it sends the next. Returns all outputs so far."""
        for _ in range(min(num_layers, CONFIG.num_layers - len(self.outputs))):
            self.channel.wait(Flag.ATTENTION_READY)
            self.outputs.append(self.channel.attn_out[: self._num_tokens].clone())
            self._send()
        return self.outputs

    def _send(self) -> None:
        if (rows := next(self._layers, None)) is not None:
            self.channel.qkv[: self._num_tokens] = rows
            self.channel.signal(qkv_flag(self._num_tokens))


class Worker:
    """An attention worker's engine with some lanes, and the other ends of these."""

    def __init__(self, engine: AttentionEngine, num_lanes: int, wait_timeout_s: float) -> None:
        self.engine = engine
        self.failures: queue.Queue[Exception] = queue.Queue()
        own: dict[int, ShmChannel] = {}
        self.lanes: list[DenseLane] = []
        attachment_id = next(_attachment_ids)
        for lane in range(num_lanes):
            own[lane] = ShmChannel.create(SPEC, EPOCH, attachment_id, lane, wait_timeout_s)
            self.lanes.append(
                DenseLane(ShmChannel.map(own[lane].handle, SPEC, EPOCH, attachment_id, TIMEOUT_S))
            )
        self.attachment = Attachment(attachment_id, own, MAX_NUM_TOKENS)
        self.attachment.fail = self.failures.put
        self.call(engine.attach, self.attachment, "00", Learned(KVScales.ones(CONFIG.num_layers)))
        self._step_ids = itertools.count(1)
        self.plans: list[Future[None]] = []

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Calls the engine on its thread."""
        self.engine.submit(function, *arguments).result(TIMEOUT_S)

    def open(self, seq_id: int, num_tokens: int, first: int = 0) -> int:
        """Opens a sequence; returns how many of its tokens are cached."""
        token_ids = tuple(range(first, first + num_tokens))
        new = NewSequence(seq_id, str(seq_id), token_ids, num_tokens)
        opened = self.engine.submit(open_now, self.engine, self.attachment, new)
        return opened.result(TIMEOUT_S).num_cached_tokens

    def publish(self, lane: int, entries: Iterable[tuple[int, int, int]] = (), closes: tuple[int, ...] = ()) -> None:
        """Publishes a plan. entries: (seq_id, position, num_tokens)"""
        planned = [PlanEntry(*each, 0) for each in entries]
        plan: StepPlan = plan_of(next(self._step_ids), *planned, lane=lane, close_seq_ids=closes)

        def accept(accepted: PlanAccepted) -> None:
            assert not accepted.errors, accepted.errors

        self.plans.append(self.engine.submit(self.engine.run_step, self.attachment, plan, 0.0, accept))

    def run(self, lane: int, seed: int, *entries: tuple[int, int, int]) -> list[torch.Tensor]:
        """Runs a step as a whole."""
        self.publish(lane, entries)
        self.lanes[lane].begin(seed, sum(num_tokens for *_, num_tokens in entries))
        return self.lanes[lane].go_on()

    def await_steps(self, num_steps: int) -> None:
        """Waits until so many steps are committed."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.engine.num_steps < num_steps:
            assert time.monotonic() < deadline, f"{self.engine.num_steps} steps are committed"
            time.sleep(0.001)
        assert self.engine.num_steps == num_steps


@contextmanager
def worker(num_lanes: int = 2, num_blocks: int = 16, wait_timeout_s: float = TIMEOUT_S) -> Iterator[Worker]:
    section = AttentionSection(num_blocks=num_blocks, block_size=BLOCK_SIZE, num_threads=1)
    metrics = AttentionMetrics(CollectorRegistry(), lambda: None)
    engine = build_engine(AttentionSetup(section, MODEL), StepLimits(4, MAX_NUM_TOKENS, num_lanes), metrics)
    made = Worker(engine, num_lanes, wait_timeout_s)
    try:
        yield made
        made.call(engine.cache.check_integrity)
        for plan in made.plans:
            plan.result(TIMEOUT_S)
    finally:
        made.attachment.abort()
        engine.stop(TIMEOUT_S)
        for lane in made.lanes:
            lane.channel.close()


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) == CONFIG.num_layers and all(map(torch.equal, found, expected))


def test_a_step_of_one_lane_runs_while_that_of_the_other_waits() -> None:
    """Each lane's outputs are those of one lane alone, whatever the other one does meanwhile."""
    with worker(num_lanes=1) as alone:
        alone.open(1, 9), alone.open(2, 7, first=100)
        expected = [
            alone.run(0, 11, (1, 0, 9)),
            alone.run(0, 21, (2, 0, 7)),
            alone.run(0, 12, (1, 9, 1)),
            alone.run(0, 22, (2, 7, 1)),
        ]
    with worker() as both:
        both.open(1, 9), both.open(2, 7, first=100)
        first, second = both.lanes
        both.publish(0, [(1, 0, 9)])
        both.publish(1, [(2, 0, 7)])
        first.begin(11, 9)
        first.go_on(2)
        second.begin(21, 7)
        assert equal(second.go_on(), expected[1]), "the whole step, in the midst of the other one"
        both.publish(1, [(2, 7, 1)])
        second.begin(22, 1)
        second.go_on(1)
        assert equal(first.go_on(), expected[0])
        assert equal(both.run(0, 12, (1, 9, 1)), expected[2])
        assert equal(second.go_on(), expected[3])
        both.await_steps(4)
        assert both.engine.num_computed_tokens == 18


def test_steps_are_committed_in_the_order_of_their_plans() -> None:
    with worker() as both:
        both.open(1, 9), both.open(2, 7, first=100)
        both.publish(0, [(1, 0, 9)])
        assert len(both.run(1, 21, (2, 0, 7))) == CONFIG.num_layers
        both.call(lambda: None)
        assert both.engine.num_steps == 0, "the first plan has not run"
        both.lanes[0].begin(11, 9)
        both.lanes[0].go_on()
        both.await_steps(2)
        both.publish(0, closes=(1,))
        assert both.open(3, 9) == 8, "the blocks of the first one are found"


def has_begun(lane: DenseLane, flag: Flag) -> bool:
    """Whether the attention worker has taken the rows that the lane has sent."""
    return not lane.channel.has_signal(flag)


def test_blocks_are_used_again_when_the_steps_that_have_them_have_ended() -> None:
    """A sequence ends while a step under way still writes a wasted token of it: the other lane takes its blocks."""
    with worker(num_blocks=4) as both:
        both.open(1, 9)
        first, second = both.lanes
        both.run(0, 11, (1, 0, 9))
        both.publish(0, [(1, 9, 1)])
        first.begin(12, 1)
        first.go_on(1)
        both.publish(0, closes=(1,))
        both.open(2, 13, first=100)
        both.publish(1, [(2, 0, 13)])  # takes all blocks
        second.begin(21, 13)
        for _ in range(20):
            both.call(lambda: None)  # a turn of the thread
        assert not has_begun(second, qkv_flag(13)), "the step would overwrite blocks that are written to"
        first.go_on()
        found = second.go_on()
        both.await_steps(4)
    with worker(num_lanes=1) as alone:
        alone.open(2, 13, first=100)
        assert equal(found, alone.run(0, 21, (2, 0, 13)))


def test_a_step_planned_before_blocks_become_free_waits_for_nothing() -> None:
    with worker() as both:
        both.open(1, 5), both.open(2, 7, first=100)
        both.publish(0, [(1, 0, 5)])
        both.publish(1, [(2, 0, 7)])
        both.publish(0, closes=(1,))
        both.lanes[1].begin(21, 7)
        assert len(both.lanes[1].go_on()) == CONFIG.num_layers


def test_an_abort_rolls_the_steps_of_both_lanes_back() -> None:
    with worker() as both:
        both.open(1, 9), both.open(2, 7, first=100)
        both.run(0, 11, (1, 0, 9)), both.run(1, 21, (2, 0, 7))
        both.await_steps(2)
        both.publish(0, [(1, 9, 1)])
        both.publish(1, [(2, 7, 1)])
        both.lanes[1].begin(22, 1)
        both.lanes[1].go_on()  # it is not committed, since the plan before it has not run
        both.attachment.abort()
        assert isinstance(both.failures.get(timeout=TIMEOUT_S), ChannelAborted)
        assert both.engine.num_steps == 2
        successor = Worker(both.engine, 2, TIMEOUT_S)
        try:
            assert (successor.open(1, 10), successor.open(2, 8, first=100)) == (9, 7)
            successor.run(1, 12, (1, 9, 1)), successor.run(0, 22, (2, 7, 1))
            successor.await_steps(4)
        finally:
            for lane in (*successor.lanes, *both.lanes):
                lane.channel.close()
            both.lanes = []


@pytest.mark.parametrize("lane", [0, 1])
def test_a_dense_worker_that_does_not_signal_in_time_ends_the_attachment(lane: int) -> None:
    with worker(wait_timeout_s=0.2) as both:
        both.open(1, 9), both.open(2, 7, first=100)
        both.publish(lane, [(1, 0, 9)])
        assert isinstance(both.failures.get(timeout=TIMEOUT_S), ChannelTimeout)
        assert both.engine.progress(CONFIG.num_layers) is None


def test_progress_is_that_of_the_oldest_step() -> None:
    with worker() as both:
        both.open(1, 9), both.open(2, 7, first=100)
        both.publish(1, [(2, 0, 7)])
        both.publish(0, [(1, 0, 9)])
        both.lanes[1].begin(21, 7)
        both.lanes[1].go_on(2)
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            progress = both.engine.progress(CONFIG.num_layers)
            if progress is not None and progress.waits_for and progress.layer == 3 % CONFIG.num_layers:
                break
            assert time.monotonic() < deadline, progress
            time.sleep(0.001)
        assert (progress.step_id, progress.request_ids, progress.waits_for) == (1, ("2",), "dense_worker")
        both.attachment.abort()
        both.failures.get(timeout=TIMEOUT_S)
