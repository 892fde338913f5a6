"""`Attachment`: the dense worker's place at an attention worker, from Attach until the stream of plans breaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.step import StepPlan

if TYPE_CHECKING:
    from services.channel import Channel  # needs torch, which the scheduler does without


@dataclass(frozen=True, slots=True)
class Attachment:
    """A mapped data region, which the engine closes, and what the attention worker said of its cache."""

    epoch: int
    attachment_id: int
    channel: Channel | None  # None: of no attention worker
    block_size: int
    num_blocks: int
    num_free_blocks: int
    held_blocks: dict[int, int]  # by sequences that an earlier dense worker left open


@dataclass(frozen=True, slots=True)
class AttachmentEnd:
    """Why an attachment ended."""

    reason: str
    is_crash: bool  # the attention worker died, or broke off a step; else somebody wanted it so
    is_replaced: bool = False  # another dense worker has attached


class AttentionPort(Protocol):
    """The engine's way to the attention worker; see `AttentionClient`. Nothing blocks."""

    def ready(self, attachment: Attachment) -> None: ...
    def publish(self, attachment: Attachment, plan: StepPlan) -> None: ...
    def drop(self, attachment: Attachment, end: AttachmentEnd) -> None: ...
