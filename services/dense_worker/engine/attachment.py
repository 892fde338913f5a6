"""`Attachment`: the dense worker's place at an attention worker, from Attach until the stream of plans breaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.step import StepPlan

if TYPE_CHECKING:
    from services.channel import Channel  # needs torch, which the scheduler does without


@dataclass(frozen=True, slots=True)
class Attachment:
    """Mapped data regions, which the engine closes, and what the attention worker said of its cache."""

    epoch: int
    attachment_id: int
    channels: Mapping[int, Channel]  # by lane
    block_size: int
    num_blocks: int
    num_free_blocks: int
    held_blocks: dict[int, int]  # by sequences that an earlier dense worker left open

    def abort(self) -> None:
        """Releases whoever waits in one of the channels, for good. May be called from any thread."""
        for channel in self.channels.values():
            channel.abort()

    def close(self) -> None:
        """Unmaps all regions; nothing may use them any more."""
        for channel in self.channels.values():
            channel.close()


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
