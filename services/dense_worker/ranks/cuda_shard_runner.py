"""`CudaShardRunner`: the steps of a shard on a GPU, by graphs of the sizes that the first rank has warmed up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from services.channel import Channel
from services.common.cuda_graphs import StepGraphs
from services.dense_worker.backends import DenseBackend
from services.dense_worker.ranks.group import RankGroup
from services.dense_worker.ranks.leading_backend import ShardOperations
from services.dense_worker.ranks.shard_runner import ShardRunner, sampled_rows
from services.dense_worker.runner.model_runner import LayerRun
from services.dense_worker.sampling.upload import upload
from services.pb import shard_pb2
from services.step import StepPlan

if TYPE_CHECKING:
    from services.dense_worker.kernels.lora.cuda_lora import CudaLora


class _Size(NamedTuple):
    num_rows: int
    num_sampled: int
    has_adapters: bool = False  # rows have some, or may


class CudaShardRunner(ShardRunner):
    """The first rank runs the segments of a size, uncaptured, and then captures that size, and so do all others. From
    then on they replay graphs of their own: between ranks only the order and the sizes of sums must agree.
    """

    def __init__(
        self,
        backend: DenseBackend,
        operations: ShardOperations,
        num_layers: int,
        max_num_tokens: int,
        device: torch.device,
        lora: CudaLora | None = None,
    ) -> None:
        super().__init__(backend, operations, num_layers, lora)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._rows = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)  # sampled ones, for all graphs
        self._graphs: dict[int, StepGraphs[_Size]] = {}  # by lane
        self._warmed: set[tuple[int, _Size]] = set()  # with lanes
        self._residuals: dict[tuple[int, _Size], torch.Tensor] = {}  # of the graphs, with lanes

    def attach(self, channels: Mapping[int, Channel], groups: Sequence[RankGroup]) -> None:
        """Forgets all graphs, which hold addresses of the attachment before."""
        torch.cuda.set_device(self._device)  # for the engine thread, which would otherwise use the first GPU
        super().attach(channels, groups)
        self._warmed.clear()
        self._residuals.clear()
        self._graphs = {lane: self._make_graphs(lane, channel) for lane, channel in channels.items()}

    @torch.inference_mode()
    def run_step(
        self,
        plan: StepPlan,
        num_rows: int,
        num_sampled: int,
        row_slots: Sequence[int] = (),
        vectors: shard_pb2.StepVectors | None = None,
    ) -> None:
        """Enqueues all layers; waits for the device only to capture a graph."""
        size = _Size(num_rows, num_sampled, bool(row_slots))
        lane, channel = plan.lane, self._channels[plan.lane]
        self._operations.use_group(self._groups[lane])
        with torch.cuda.stream(self._stream):
            self._begin_step(plan, num_rows, num_sampled, row_slots)
            if not len(plan.entries):
                self._run_segments(channel, size)
                self._warmed.add((lane, size))
                self._graphs[lane].capture(size)  # now, as the first rank: a step would wait for it
                return
            self._rows[:num_sampled].copy_(upload(sampled_rows(plan, num_sampled).numpy(), self._device))
            if (lane, size) in self._warmed and vectors is None:
                graph = self._graphs[lane].find(size)
                graph.replay()
                residual = self._residuals[lane, size]
            else:
                residual = self._run_rows(channel, size, vectors, lane)
        self._rows_of[lane] = channel.attn_out[:num_rows], residual

    @torch.inference_mode()
    def compute_rows(self, lane: int, rows: list[int]) -> None:
        """Enqueues it."""
        if self._backend.always_ends:
            return
        self._operations.use_group(self._groups[lane])
        with torch.cuda.stream(self._stream):
            self._backend.last(*self._rows_of[lane], torch.tensor(rows, device=self._device))

    def finish_steps(self) -> None:
        """Waits for the device."""
        self._stream.synchronize()

    def _make_graphs(self, lane: int, channel: Channel) -> StepGraphs[_Size]:
        def run(size: _Size) -> None:
            self._residuals[lane, size] = self._run_rows(channel, size, None, lane)

        return StepGraphs(self._stream, lambda size: None, run, undisturbed=self._groups[lane].capturing)

    def _tokens(self, num_rows: int) -> torch.Tensor:
        token_ids = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        self._operations.share_tokens(token_ids)
        return token_ids

    def _run_rows(
        self, channel: Channel, size: _Size, vectors: shard_pb2.StepVectors | None, lane: int
    ) -> torch.Tensor:
        layers = LayerRun(self._backend, channel, self._num_layers)
        token_ids, embeds = self._tokens(size.num_rows), None
        if vectors is not None:
            embeds = self._receive(vectors, lane, self._device).upload(self._device)
        layers.begin(token_ids, embeds)
        return layers.finish(self._rows[: size.num_sampled])[1]

    def _run_segments(self, channel: Channel, size: _Size) -> None:
        """Each segment once, without handoffs, as the first rank does before it captures this size."""
        qkv, attn_out = channel.qkv[: size.num_rows], channel.attn_out[: size.num_rows]
        attn_out.zero_()
        self._rows.zero_()  # it may hold rows of an earlier step, which are not valid in a smaller one
        residual = self._backend.first(self._tokens(size.num_rows), qkv)
        if self._num_layers > 1:
            residual = self._backend.middle(0, channel.fetch_attn_out(size.num_rows), residual, qkv)
        self._backend.last(attn_out, residual, self._rows[: size.num_sampled])
