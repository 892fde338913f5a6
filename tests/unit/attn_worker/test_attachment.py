"""The lanes of an attachment: the progress of a step in its lane, and the common end of all lanes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from services.attn_worker.attachment import Attachment
from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.engine import AttentionEngine
from services.attn_worker.metrics import AttentionMetrics
from services.attn_worker.runner.layer_runner import FinishedStep
from services.common.attention.learned import Learned
from services.common.errors import DeviceError
from services.common.kv_cache.scales import KVScales
from services.rpc.watchdog import Progress
from services.step import NewSequence, PlanEntry
from tests.support.attention.open_now import open_now
from tests.support.plans import plan_of

NUM_LAYERS = 4


def make_attachment() -> tuple[Attachment, list[str]]:
    """An attachment with two lanes, and a list of the calls of their channels."""
    actions: list[str] = []

    def channel(lane: int, num_waits: int) -> Any:
        return SimpleNamespace(
            num_waits=num_waits,
            is_waiting=lane == 1,
            abort=lambda: actions.append(f"abort {lane}"),
            close=lambda: actions.append(f"close {lane}"),
        )

    return Attachment(7, {0: channel(0, 9), 1: channel(1, 14)}, max_num_tokens=16), actions


def test_progress_comes_from_the_channel_of_the_steps_lane() -> None:
    attachment, _ = make_attachment()
    assert attachment.progress(3, NUM_LAYERS) is None
    attachment.request_ids[5] = "named"
    entries = (PlanEntry(5, 0, 1, 1), PlanEntry(0xAB, 0, 1, 1))
    attachment.launching = plan_of(30, *entries, lane=1)
    assert attachment.progress(3, NUM_LAYERS) == Progress(
        (7, 3, 30, 9, 14), step_id=30, layer=2, request_ids=("named", "ab"), waits_for="dense_worker"
    )
    attachment.launching = plan_of(31, *entries, lane=0)
    progress = attachment.progress(3, NUM_LAYERS)
    assert progress is not None and (progress.layer, progress.waits_for) == (1, "")


def test_all_lanes_end_together() -> None:
    attachment, actions = make_attachment()
    attachment.abort()
    attachment.close()
    assert actions == ["abort 0", "abort 1", "close 0", "close 1"]


def test_a_step_runs_on_the_channel_of_its_lane() -> None:
    channels: dict[int, Any] = {lane: SimpleNamespace(waited_s=None, close=lambda: None) for lane in (0, 1)}
    used: list[Any] = []

    def launch(_: object, channel: Any, after: object) -> FinishedStep:
        used.append(channel)
        return FinishedStep()

    runner: Any = SimpleNamespace(attach=lambda channels, scales, *others: None, launch=launch)
    metrics = AttentionMetrics(CollectorRegistry(), lambda: None)
    engine = AttentionEngine(build_cache(8, 4, max_model_len=32), runner, metrics)
    attachment = Attachment(7, channels, max_num_tokens=16)
    engine.attach(attachment, "00", Learned(KVScales.ones(NUM_LAYERS)))
    open_now(engine, attachment, NewSequence(5, "named", (1, 2, 3), 3))
    for step_id, lane in ((1, 1), (2, 0)):
        plan = plan_of(step_id, PlanEntry(5, step_id - 1, 1, 0), lane=lane)
        engine.run_step(attachment, plan, 0.0, lambda accepted: None)
    assert used == [channels[1], channels[0]]


def test_blocks_stored_with_other_scales_are_not_found() -> None:
    used: list[KVScales] = []
    runner: Any = SimpleNamespace(
        attach=lambda channels, learned: used.append(learned.scales),
        launch=lambda step, channel, after: FinishedStep(),
    )
    engine = AttentionEngine(
        build_cache(8, 4, max_model_len=32), runner, AttentionMetrics(CollectorRegistry(), lambda: None)
    )
    channel: Any = SimpleNamespace(waited_s=None, close=lambda: None)
    ones, others = KVScales.ones(2), KVScales((1.0, 1.0), (1.0, 1.5))

    def attach_and_open(seq_id: int, scales: KVScales, weights_hash: str = "00") -> int:
        """Attaches, runs a sequence of nine tokens to its end; returns how many of them were found."""
        attachment = Attachment(seq_id, {0: channel}, max_num_tokens=16)
        engine.attach(attachment, weights_hash, Learned(scales))
        opened = open_now(engine, attachment, NewSequence(seq_id, "", tuple(range(9)), 9))
        num_cached = opened.num_cached_tokens
        entries = (PlanEntry(seq_id, num_cached, 9 - num_cached, 0),)
        engine.run_step(attachment, plan_of(1, *entries), 0.0, lambda accepted: None)
        engine.run_step(attachment, plan_of(2, close_seq_ids=(seq_id,)), 0.0, lambda accepted: None)
        return num_cached

    assert attach_and_open(1, ones) == 0
    assert attach_and_open(2, ones) == 8
    assert attach_and_open(3, others) == 0
    assert attach_and_open(4, others) == 8
    assert attach_and_open(5, others, weights_hash="01") == 0
    assert used == [ones, ones, others, others, others]


def test_a_sequence_stored_with_other_scales_is_not_continued() -> None:
    runner: Any = SimpleNamespace(
        attach=lambda channels, scales, *others: None, launch=lambda step, channel, after: FinishedStep()
    )
    engine = AttentionEngine(
        build_cache(8, 4, max_model_len=32), runner, AttentionMetrics(CollectorRegistry(), lambda: None)
    )
    channel: Any = SimpleNamespace(waited_s=None, close=lambda: None)
    new = NewSequence(1, "", tuple(range(7)), 7)
    for scales, num_cached in ((KVScales.ones(1), 0), (KVScales.ones(1), 6), (KVScales((2.0,), (1.0,)), 0)):
        attachment = Attachment(1, {0: channel}, max_num_tokens=16)
        engine.attach(attachment, "00", Learned(scales))
        assert open_now(engine, attachment, new).num_cached_tokens == num_cached
        plan = plan_of(1, PlanEntry(1, num_cached, 7 - num_cached, 0))
        engine.run_step(attachment, plan, 0.0, lambda accepted: None)


def test_graphs_are_captured_while_nobody_has_a_sequence() -> None:
    left = [3, 2, 1]
    runner: Any = SimpleNamespace(
        attach=lambda channels, learned: None,
        launch=lambda step, channel, after: FinishedStep(),
        capture_ahead=lambda: bool(left) and bool(left.pop()),
    )
    engine = AttentionEngine(
        build_cache(8, 4, max_model_len=32), runner, AttentionMetrics(CollectorRegistry(), lambda: None)
    )
    assert engine._work() is None, "nothing is attached"
    attachment = Attachment(1, {0: SimpleNamespace(waited_s=None, close=lambda: None)}, max_num_tokens=16)  # type: ignore
    engine.attach(attachment, "00", Learned(KVScales.ones(2)))
    assert engine._work() == 0.0 and left == [3, 2], "one at a time, so that a sequence waits for one at most"
    open_now(engine, attachment, NewSequence(5, "", (1, 2, 3), 3))
    assert engine._work() is None and left == [3, 2]
    engine.run_step(attachment, plan_of(1, PlanEntry(5, 0, 3, 0)), 0.0, lambda accepted: None)
    assert engine._work() is None and left == [3, 2], "the sequence goes on"
    engine.run_step(attachment, plan_of(2, close_seq_ids=(5,)), 0.0, lambda accepted: None)
    assert [engine._work() for _ in range(3)] == [0.0, 0.0, None]


def test_other_lanes_wait_for_no_capture() -> None:
    channels: dict[int, Any] = {lane: SimpleNamespace(close=lambda: None) for lane in (0, 1)}
    runner: Any = SimpleNamespace(attach=lambda channels, learned: None, advance=lambda: False)  # and no capture_ahead
    engine = AttentionEngine(
        build_cache(8, 4, max_model_len=32), runner, AttentionMetrics(CollectorRegistry(), lambda: None)
    )
    engine.attach(Attachment(1, channels, max_num_tokens=16), "00", Learned(KVScales.ones(2)))
    assert engine._work() is None


def test_a_capture_that_fails_ends_the_attachment_and_not_the_engine() -> None:
    def capture_ahead() -> bool:
        raise DeviceError("the GPU has failed")

    runner: Any = SimpleNamespace(attach=lambda channels, learned: None, capture_ahead=capture_ahead)
    engine = AttentionEngine(
        build_cache(8, 4, max_model_len=32), runner, AttentionMetrics(CollectorRegistry(), lambda: None)
    )
    errors = list[Exception]()
    attachment = Attachment(1, {0: SimpleNamespace(close=lambda: None)}, max_num_tokens=16)  # type: ignore
    attachment.fail = errors.append
    engine.attach(attachment, "00", Learned(KVScales.ones(2)))
    assert engine._work() is None
    assert [str(each) for each in errors] == ["the GPU has failed"]
