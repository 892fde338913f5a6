"""The engine's progress for the watchdog; may be read from any thread."""

from __future__ import annotations

from services.dense_worker.engine.observer import EngineCounts
from services.dense_worker.engine.session import Session
from services.rpc.watchdog import Progress


def progress_of(session: Session, counts: EngineCounts, num_layers: int) -> Progress | None:
    """The progress of the oldest step in flight, or None without work."""
    num_waits = [channel.num_waits or 0 for channel in session.attachment.channels.values()]
    counter = (session.attachment.attachment_id, counts.num_steps, session.num_completed, *num_waits)
    oldest = next(iter(session.in_flight), None)
    if oldest is not None:
        plan, channel = oldest.published.plan, oldest.channel
        return Progress(
            counter,
            step_id=plan.step_id,
            layer=None if channel.num_waits is None else channel.num_waits % num_layers,
            request_ids=tuple(session.request_ids.get(each, f"{each:x}") for each in plan.entries.seq_ids.tolist()),
            waits_for="attn_worker" if channel.is_waiting else "",
        )
    # Between two steps the engine waits for an answer, or for blocks that other gateways may still claim.
    if counts.num_running or counts.num_opening or (counts.num_waiting and session.claim_deadline_s is None):
        return Progress(counter, waits_for="attn_worker")
    return None
