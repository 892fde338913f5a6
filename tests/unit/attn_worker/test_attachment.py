"""The lanes of an attachment: the progress of a step in its lane, and the common end of all lanes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from services.attn_worker.attachment import Attachment
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.engine import AttentionEngine
from services.attn_worker.metrics import AttentionMetrics
from services.attn_worker.runner.layer_runner import FinishedStep
from services.rpc.watchdog import Progress
from services.step import NewSequence, PlanEntry, StepPlan

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
    attachment.launching = StepPlan(30, entries, lane=1)
    assert attachment.progress(3, NUM_LAYERS) == Progress(
        (7, 3, 30, 9, 14), step_id=30, layer=2, request_ids=("named", "ab"), waits_for="dense_worker"
    )
    attachment.launching = StepPlan(31, entries, lane=0)
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

    def launch(_: object, channel: Any) -> FinishedStep:
        used.append(channel)
        return FinishedStep()

    runner: Any = SimpleNamespace(attach=lambda channels: None, launch=launch)
    metrics = AttentionMetrics(CollectorRegistry(), lambda: None)
    engine = AttentionEngine(KVCache(8, 4, max_model_len=32), runner, metrics)
    attachment = Attachment(7, channels, max_num_tokens=16)
    engine.attach(attachment, "00")
    engine.open_sequence(attachment, NewSequence(5, "named", (1, 2, 3), 3))
    for step_id, lane in ((1, 1), (2, 0)):
        plan = StepPlan(step_id, (PlanEntry(5, step_id - 1, 1, 0),), lane=lane)
        engine.run_step(attachment, plan, 0.0, lambda accepted: None)
    assert used == [channels[1], channels[0]]
