"""`JoinedChannel`: the seams to several attention workers, as one `Channel` of the dense worker.

The model's segments write and read rows of memory of this process, in batch order. Each signal copies every worker's
rows to the first rows of its own data region, and each wait copies its outputs back.

A worker that goes away in a step is left out of the rest of it: its rows have no meaning, and all others are valid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from services.channel import Channel, ChannelAborted, ChannelSpec, Flag, qkv_flag, rows_of_layer
from services.channel.log_sums import log_sums_of
from services.channel.shm import ShmChannel
from services.common.errors import PeerError
from services.dense_worker.attention_workers.split_context.shared_rows import SharedRows

C = TypeVar("C", bound=Channel)


class LayerSizes(NamedTuple):
    """Elements of a row of the seam in one layer."""

    qkv: int
    attn_out: int
    num_heads: int = 1


class _Part(NamedTuple):
    """One worker's share of a step."""

    cache_id: int
    channel: ShmChannel | None  # None: it has gone before the step
    rows: torch.Tensor  # int64 [num_rows]


class JoinedSeams(Generic[C]):
    """The seams to several workers, which are told apart by their cache_id.

    All methods but `lose` and `abort` are for the engine thread. A subclass gives rows to workers and takes theirs.
    """

    kind = "joined"

    def __init__(
        self,
        spec: ChannelSpec,
        layers: Sequence[LayerSizes],
        on_lost: Callable[[int, str], None],
        device: torch.device | None = None,
    ) -> None:
        """`on_lost` is called on the engine thread with a worker that a step has lost, and the reason."""
        self.qkv = torch.zeros(spec.max_tokens, spec.qkv_size, dtype=spec.dtype, device=device)
        self.attn_out = torch.zeros(spec.max_tokens, spec.attn_size, dtype=spec.dtype, device=device)
        self._layers = layers
        self._on_lost = on_lost
        self._members: dict[int, C] = {}
        self._lost: set[int] = set()
        self._is_aborted = False
        self._expected: dict[int, Mapping[int, np.ndarray]] = {}  # rows of each worker, by step_id
        self._layer = 0  # the attention workers compute it, or will next

    @property
    def num_errors(self) -> int:
        """The sum over the workers that are there."""
        return sum([each.num_errors for cache_id, each in self._members.items() if cache_id not in self._lost])

    def lose(self, cache_id: int) -> None:
        """Leaves a worker out from now on, and releases whoever waits for it. May be called from any thread."""
        self._lost.add(cache_id)
        if (member := self._members.get(cache_id)) is not None:
            member.abort()

    def expect(self, step_id: int, rows: Mapping[int, np.ndarray]) -> None:
        """A step will begin, with these rows of each worker: int64 [num_rows]."""
        self._expected[step_id] = rows

    def _take_expected(self, step_id: int) -> Mapping[int, np.ndarray]:
        """The rows of a step that begins. Steps before it that had none are forgotten, and workers that are gone."""
        rows = self._expected.pop(step_id)
        for past in [each for each in self._expected if each < step_id]:
            del self._expected[past]
        self._forget_lost()
        return rows

    def _forget_lost(self) -> None:
        for cache_id in self._lost & self._members.keys():
            self._drop(self._members.pop(cache_id))

    def _drop(self, channel: C) -> None:
        """No later step uses it."""
        channel.close()

    def fetch_attn_out(self, num_tokens: int) -> torch.Tensor:
        """The first rows of `attn_out` themselves."""
        return self.attn_out[:num_tokens]

    def check(self) -> None:
        """Raises `ChannelAborted` if all workers are given up."""
        if self._is_aborted:
            raise ChannelAborted("the attachment to all attention workers has ended")

    def add_errors(self, count: int) -> None:
        raise AssertionError("attention workers count errors, each in its own region")

    def tie(self, handles: Iterable[bytes]) -> None:
        raise AssertionError("ranks have one attention worker each")

    def abort(self) -> None:
        """Gives up all workers."""
        self._is_aborted = True
        for channel in list(self._members.values()):
            channel.abort()

    def close(self) -> None:
        """Unmaps all regions."""
        for channel in self._members.values():
            channel.close()


class JoinedChannel(JoinedSeams[ShmChannel]):
    """On CPUs: it copies rows, and counts its waits."""

    def __init__(
        self,
        spec: ChannelSpec,
        layers: Sequence[LayerSizes],
        members: Mapping[int, ShmChannel],
        on_lost: Callable[[int, str], None],
    ) -> None:
        super().__init__(spec, layers, on_lost)
        for cache_id, channel in members.items():
            self.add(cache_id, channel)
        self.waited_s: float | None = 0.0
        self.num_waits: int | None = 0
        self.is_waiting = False
        self._parts: list[_Part] = []  # of the present step
        self._shared: SharedRows | None = None  # rows of several workers in the present step
        self._num_rows = 0

    @property
    def lost_caches(self) -> Collection[int]:
        """Workers that have gone, by cache_id."""
        return tuple(self._lost)

    def add(self, cache_id: int, channel: ShmChannel) -> None:
        """A further worker has rows of later steps. The others go on without it as soon as it is killed."""
        channel.looks_for_owner = True
        self._members[cache_id] = channel

    def begin_step(self, step_id: int, num_rows: int) -> None:
        """Takes what is expected of the step."""
        rows = self._take_expected(step_id)
        self._num_rows = num_rows
        self._parts = [_Part(each, self._members.get(each), torch.from_numpy(own)) for each, own in rows.items()]
        self._shared = None
        if len(rows) > 1 and sum(map(len, rows.values())) > num_rows:
            self._shared = SharedRows([part.rows for part in self._parts], num_rows)

    def begin_layers(self, num_rows: int) -> None:
        """The layers of the step follow."""
        self._layer = 0

    def signal(self, flag: Flag) -> None:
        """Gives each worker its rows of qkv."""
        width = self._layers[self._layer].qkv
        qkv = rows_of_layer(self.qkv[: self._num_rows], width)
        for cache_id, channel, rows in self._parts:
            if channel is not None and cache_id not in self._lost:
                torch.index_select(qkv, 0, rows, out=rows_of_layer(channel.qkv[: len(rows)], width))
                channel.signal(qkv_flag(len(rows)))

    def wait(self, flag: Flag) -> None:
        """Takes the outputs of each worker when it has signalled, and goes on without those that are gone."""
        width = self._layers[self._layer].attn_out
        attn_out = rows_of_layer(self.attn_out[: self._num_rows], width)
        start = time.perf_counter()
        self.is_waiting = True
        try:
            for part in self._parts:
                attn_out[part.rows] = self._output_of(part, flag, width)
            if self._shared is not None:
                attn_out[self._shared.rows] = self._shared.merge([self._with_log_sums(part) for part in self._parts])
        finally:
            self.is_waiting = False
        self._layer += 1
        assert self.num_waits is not None and self.waited_s is not None, "they are counted on a CPU"
        self.num_waits += 1
        self.waited_s += time.perf_counter() - start

    def _output_of(self, part: _Part, flag: Flag, width: int) -> torch.Tensor:
        """What a worker has written, [num_rows, width], when it has signalled; zeros if it is gone."""
        cache_id, channel, rows = part
        if channel is not None and cache_id not in self._lost:
            try:
                channel.wait(flag)
            except PeerError as error:
                self.check()
                self.lose(cache_id)
                self._on_lost(cache_id, str(error))
            else:
                return rows_of_layer(channel.attn_out[: len(rows)], width)
        return self.attn_out.new_zeros(len(rows), width)

    def _with_log_sums(self, part: _Part) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What a worker has written for its rows, which it has signalled; None if it is gone."""
        cache_id, channel, rows = part
        if channel is None or cache_id in self._lost:
            return None
        sizes = self._layers[self._layer]
        qkv, attn_out = (
            rows_of_layer(each[: len(rows)], width)
            for each, width in ((channel.qkv, sizes.qkv), (channel.attn_out, sizes.attn_out))
        )
        return attn_out, log_sums_of(qkv, sizes.attn_out, sizes.num_heads)

    def close(self) -> None:
        """Unmaps all regions."""
        self._parts.clear()
        super().close()
