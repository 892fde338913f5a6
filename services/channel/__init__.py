"""The seam between the two workers: one data region per lane, flags, and an abort mark.

The attention worker creates a region for each attachment and owns it; the dense worker maps it. Both run
`signal` and `wait` from their engine thread, in the same order, layer by layer:

    dense      write qkv      signal(QKV_READY)   wait(ATTENTION_READY)   read attn_out
    attention  wait(QKV_READY)   read qkv, write attn_out   signal(ATTENTION_READY)

In long steps LONG_STEP_QKV_READY stands for QKV_READY: see `qkv_flag`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.common.batch_buckets import SHORT_STEP_TOKENS
from services.common.errors import PeerError

if TYPE_CHECKING:
    import torch


# Kinds of channel between GPUs, by what waits; see `cuda_flags`.
SPINNING, QUEUED = CUDA_KINDS = ("cuda_ipc_spinning", "cuda_ipc_queued")


class Flag(enum.IntEnum):
    """The handoffs. Each flag is 0 or 1: the producer sets it, the consumer waits for 1 and clears it."""

    QKV_READY = 0
    ATTENTION_READY = 1
    LONG_STEP_QKV_READY = 2


def qkv_flag(num_tokens: int) -> Flag:
    """What tells the attention worker, in a step of so many tokens, that qkv is ready.

    It is a flag of its own where the dense worker's matrix products want every SM of a GPU: a kernel that polled for
    it would take one from them, and with it up to two thirds more time.
    """
    return Flag.QKV_READY if num_tokens <= SHORT_STEP_TOKENS else Flag.LONG_STEP_QKV_READY


class ChannelAborted(PeerError):
    """The peer is gone; nothing computed since the last completed step may be used."""


class ChannelTimeout(PeerError):
    """The peer did not signal within the channel's bound."""


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """Shape of a data region; both sides derive it from the model and the attachment.

    qkv is `[max_tokens, qkv_size]`, attn_out `[max_tokens, attn_size]`, both of the model's dtype.
    """

    max_tokens: int
    qkv_size: int
    attn_size: int
    dtype: torch.dtype

    @property
    def qkv_bytes(self) -> int:
        return self.max_tokens * self.qkv_size * self.dtype.itemsize

    @property
    def attn_out_bytes(self) -> int:
        return self.max_tokens * self.attn_size * self.dtype.itemsize


class Channel(Protocol):
    """What an engine needs of the seam, whatever memory is underneath.

    On CPU `signal` and `wait` act at once. On CUDA they enqueue on the current stream and may be captured
    in a graph. Rows of `qkv` hold all query heads, then all key heads, then all value heads.
    """

    kind: str  # as in `LaneHandle`
    qkv: torch.Tensor  # [max_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    attn_out: torch.Tensor  # [max_tokens, num_heads * head_dim]
    waited_s: float | None  # seconds spent in `wait` so far; None on CUDA, where no host sees them
    num_waits: int | None  # calls of `wait` that have ended well; None on CUDA
    is_waiting: bool  # a thread is in `wait` now; always False on CUDA

    def signal(self, flag: Flag) -> None:
        """Publishes everything written so far to the peer."""

    def wait(self, flag: Flag) -> None:
        """Returns, or lets the stream go on, once the peer has signalled.

        On CPU it raises `ChannelAborted` or `ChannelTimeout`. On CUDA an abort lets the stream run through
        with meaningless data: call `check` when the device is done, before using any result.
        """

    def fetch_attn_out(self, num_tokens: int) -> torch.Tensor:
        """The first rows of `attn_out`, [num_tokens, attn_size], where this process can read them often and fast.

        The dense worker calls it after a wait for ATTENTION_READY, where it needs all rows: of the last layer it reads
        those from `attn_out` that are sampled. The tensor is valid until the next call.
        """
        ...

    def check(self) -> None:
        """Raises `ChannelAborted` after an abort."""

    def add_errors(self, count: int) -> None:
        """Counts sequences that cannot take part in a step; by the attention worker, before its first handoff."""

    @property
    def num_errors(self) -> int:
        """All counted so far: as long as it stays the same, every row of every step has meaning."""
        ...

    def abort(self) -> None:
        """Releases every wait on both sides, for good. May be called from any thread."""

    def close(self) -> None:
        """Unmaps the region; its creator also removes it. Its tensors must not be used afterwards."""


def align_up(num_bytes: int, alignment: int) -> int:
    """Smallest multiple of `alignment` that holds `num_bytes`."""
    return math.ceil(num_bytes / alignment) * alignment
