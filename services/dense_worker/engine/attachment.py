"""`Attachment`: the dense worker's connection to an attention worker, from Attach until the stream of plans ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.step import StepPlan

if TYPE_CHECKING:
    from services.channel import Channel  # needs torch, which the scheduler does without
    from services.channel.message_link import MessageLink
    from services.dense_worker.ranks.leading_backend import LeadingRanks


@dataclass(frozen=True, slots=True)
class AttachedCache:
    """The KV cache of an attention worker, as it was when that worker attached."""

    cache_id: int  # 0 of the first one, ascending; never used again in an attachment
    num_blocks: int
    num_free_blocks: int
    orphaned_blocks: dict[int, int]  # number of blocks, by seq_id of sequences that an earlier dense worker left open
    is_empty: bool = False  # no block of a sequence can be found in it, since none was there before
    prefix_generation: int = 0  # the highest that it has seen, see `NewSequence`
    num_host_blocks: int = 0  # for which its host tier has room


@dataclass(frozen=True, slots=True)
class Attachment:
    """The mapped data regions, which the engine closes, and what the attention workers' caches have in common."""

    epoch: int
    attachment_id: int
    channels: Mapping[int, Channel]  # by lane
    block_size: int
    caches: tuple[AttachedCache, ...]  # at least one; several attention workers have one each
    max_model_len: int  # tokens of the longest sequence that the model and the caches allow
    window: int | None = None  # of the KV caches, see `SlidingWindow`
    num_sink_tokens: int = 0
    layer_window: int | None = None  # of layers whose blocks the attention worker drops by itself; None: there are none
    max_num_sequences: int | None = None  # that a KV cache keeps at a time; None: as many as have blocks
    link: MessageLink | None = None  # for plans and answers; None: they go by gRPC
    rehearses: bool = False  # whether both workers get ready for requests that are announced
    ranks: LeadingRanks | None = None  # the other ranks, of which each has an attention worker; None: there are none

    def abort(self) -> None:
        """Releases all waits in the channels, of the link, and for other ranks, for good.

        May be called from any thread.
        """
        for channel in self.channels.values():
            channel.abort()
        if self.link is not None:
            self.link.close()
        if self.ranks is not None:
            self.ranks.abort()

    def close(self) -> None:
        """Unmaps all regions; they must not be used afterwards."""
        for channel in self.channels.values():
            channel.close()


@dataclass(frozen=True, slots=True)
class AttachmentEnd:
    """Why an attachment ended."""

    reason: str
    is_crash: bool  # True if the attention worker died or aborted a step; False if the end was requested
    is_replaced: bool = False  # another dense worker has attached


class AttentionPort(Protocol):
    """How the engine reaches the attention worker; see `AttentionClient`. No method blocks but `publish`, see there."""

    def ready(self, attachment: Attachment) -> None: ...
    def publish(self, attachment: Attachment, plan: StepPlan) -> None: ...
    def drop(self, attachment: Attachment, end: AttachmentEnd) -> None: ...
    def release(self, attachment: Attachment, cache_id: int) -> None: ...
    def keep(self, attachment: Attachment, cache_id: int, reason: str) -> None: ...
    def forget(self, attachment: Attachment, cache_id: int) -> None: ...
