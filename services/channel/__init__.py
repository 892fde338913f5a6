"""The seam between the two workers: one data region per lane, flags, and an abort mark.

The attention worker creates a region for each attachment and owns it; the dense worker maps it. Both run
`signal` and `wait` from their engine thread, in the same order, layer by layer:

    dense      write qkv      signal(QKV_READY)   wait(ATTENTION_READY)   read attn_out
    attention  wait(QKV_READY)   read qkv, write attn_out   signal(ATTENTION_READY)

Long steps use LONG_STEP_QKV_READY instead of QKV_READY: see `qkv_flag`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.common.batch_buckets import SHORT_STEP_TOKENS
from services.common.errors import PeerError

if TYPE_CHECKING:
    import torch


# Kinds of channel between GPUs: a kernel polls the flags, or the stream's queue waits for them; see `cuda_flags`.
SPINNING, QUEUED = CUDA_KINDS = ("cuda_ipc_spinning", "cuda_ipc_queued")


class Flag(enum.IntEnum):
    """The handoffs. Each flag is 0 or 1: the producer sets it, the consumer waits for 1 and clears it."""

    QKV_READY = 0
    ATTENTION_READY = 1
    LONG_STEP_QKV_READY = 2


def qkv_flag(num_tokens: int) -> Flag:
    """The flag that tells the attention worker that qkv is ready, in a step of `num_tokens` tokens.

    Long steps have a flag of their own, because their matrix products use every SM of a GPU. A kernel that polls for
    the flag would occupy one SM, and the matrix products would take up to two thirds longer.
    """
    return Flag.QKV_READY if num_tokens <= SHORT_STEP_TOKENS else Flag.LONG_STEP_QKV_READY


class ChannelAborted(PeerError):
    """The peer is gone. Results computed since the last completed step must not be used."""


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
    """The seam as an engine uses it, independent of the memory underneath.

    On CPU `signal` and `wait` act at once. On CUDA they enqueue on the current stream and may be captured
    in a graph. Rows of `qkv` hold all query heads, then all key heads, then all value heads.
    """

    kind: str  # as in the message `LaneHandle`
    qkv: torch.Tensor  # [max_tokens, `ModelConfig.qkv_size`]: q heads, then k heads, then any v heads
    attn_out: torch.Tensor  # [max_tokens, `ModelConfig.attn_size`]
    waited_s: float | None  # seconds spent in `wait` so far; None on CUDA, where the host does not see the waits
    num_waits: int | None  # calls of `wait` that have returned without an error; None on CUDA
    # Attention workers that have gone in a step that goes on with others, by `cache_id`; none where there is one.
    lost_caches: Collection[int]
    is_waiting: bool  # whether a thread is in `wait` now; always False on CUDA

    def begin_step(self, step_id: int, num_rows: int) -> None:
        """The dense worker calls it before it runs or enqueues a step, of `num_rows` rows with padding."""

    def begin_layers(self, num_rows: int) -> None:
        """The dense worker calls it before it runs, enqueues or captures the layers of a step of `num_rows` rows."""

    def signal(self, flag: Flag) -> None:
        """Publishes everything written so far to the peer."""

    def wait(self, flag: Flag) -> None:
        """Blocks the thread (on CPU) or the stream (on CUDA) until the peer has signalled.

        On CPU it raises `ChannelAborted` or `ChannelTimeout`. On CUDA an abort lets the stream run through
        with meaningless data: call `check` when the device is done, before using any result.
        """

    def fetch_attn_out(self, num_tokens: int) -> torch.Tensor:
        """The first rows of `attn_out`, [num_tokens, attn_size], in memory that this process reads fast.

        The dense worker calls it after a wait for ATTENTION_READY, in every layer but the last: there it reads only
        the sampled rows, directly from `attn_out`. The tensor is valid until the next call.
        """
        ...

    def check(self) -> None:
        """Raises `ChannelAborted` after an abort."""

    def add_errors(self, count: int) -> None:
        """Adds `count` sequences that cannot take part in a step.

        The attention worker calls it before the first handoff of the step.
        """

    @property
    def num_errors(self) -> int:
        """Sum of all `add_errors` so far. If a step does not change it, every row of the step is valid."""
        ...

    def tie(self, handles: Iterable[bytes]) -> None:
        """Makes this channel and those of other ranks, by their handles, share their fate.

        The first rank's dense worker calls it, once, before any step. An abort of one of them is found by `check` at
        all of their ends before it releases a wait, and this end's `num_errors` is the largest of all. Raises
        `StaleEpoch` if one does not exist any more.
        """

    def abort(self) -> None:
        """Releases every wait on both sides, for good. May be called from any thread."""

    def close(self) -> None:
        """Unmaps the region; its creator also removes it. Its tensors must not be used afterwards."""


def rows_of_layer(rows: torch.Tensor, width: int) -> torch.Tensor:
    """The first elements of rows of the seam, [n, widest layer], as rows [n, width] without gaps.

    Both workers use it for layers whose heads are narrower than those of others.
    """
    return rows if rows.shape[1] == width else rows.view(-1)[: len(rows) * width].view(-1, width)


def align_up(num_bytes: int, alignment: int) -> int:
    """Smallest multiple of `alignment` that holds `num_bytes`."""
    return math.ceil(num_bytes / alignment) * alignment
