"""`ShardRunner`: runs the steps of a shard as the first rank commands. Owned by the shard's engine thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from services.channel import Channel
from services.dense_worker.backends import DenseBackend, InputEmbeds
from services.dense_worker.kernels.lora.tensors import LoraStore
from services.dense_worker.ranks.group import RankGroup
from services.dense_worker.ranks.leading_backend import ShardOperations
from services.dense_worker.runner.model_runner import LayerRun
from services.dense_worker.runner.step_input import SampledRows
from services.pb import shard_pb2
from services.step import StepPlan


class ShardRunner:
    """Keeps no sequence: a plan says how many rows a step has, and the first rank gives their tokens."""

    def __init__(
        self, backend: DenseBackend, operations: ShardOperations, num_layers: int, lora: LoraStore | None
    ) -> None:
        """`operations` and `lora`: those of the backend."""
        self._backend = backend
        self._operations = operations
        self._num_layers = num_layers
        self._lora = lora  # None: there are no adapters
        self._channels: Mapping[int, Channel] = {}
        self._groups: Sequence[RankGroup] = ()
        self._rows_of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by lane: attn_out, residual of its last step

    def attach(self, channels: Mapping[int, Channel], groups: Sequence[RankGroup]) -> None:
        """Makes later steps run on these channels, and with these ranks, both by lane."""
        self._channels, self._groups = channels, groups
        self._rows_of.clear()

    @torch.inference_mode()
    def run_step(
        self,
        plan: StepPlan,
        num_rows: int,
        num_sampled: int,
        row_slots: Sequence[int] = (),
        vectors: shard_pb2.StepVectors | None = None,
    ) -> None:
        """Runs all layers. Raises the errors of `Channel.wait` and of the group.

        row_slots: where the adapter of each row is, or -1; empty: no row has one. vectors: None: no row has one
        """
        channel = self._channels[plan.lane]
        self._operations.use_group(self._groups[plan.lane])
        self._begin_step(plan, num_rows, num_sampled, row_slots)
        token_ids = torch.zeros(num_rows, dtype=torch.int64)
        self._operations.share_tokens(token_ids)
        layers = LayerRun(self._backend, channel, self._num_layers)
        layers.begin(token_ids, None if vectors is None else self._receive(vectors, plan.lane, token_ids.device))
        _, residual = layers.finish(sampled_rows(plan, num_sampled))
        self._rows_of[plan.lane] = channel.attn_out[:num_rows], residual

    def _receive(self, vectors: shard_pb2.StepVectors, lane: int, device: torch.device) -> InputEmbeds:
        """What the first rank gives all ranks after the tokens."""
        rows, dtype = torch.tensor(vectors.rows, dtype=torch.int64), self._channels[lane].qkv.dtype
        group, shape = self._groups[lane], (len(rows), vectors.size)
        given = torch.empty(shape, dtype=dtype, device=device)
        group.broadcast(given)
        deep = None
        if vectors.num_deep:
            deep = torch.empty(vectors.num_deep, *shape, dtype=dtype, device=device)
            group.broadcast(deep)
        return InputEmbeds(rows, given, deep)

    @torch.inference_mode()
    def compute_rows(self, lane: int, rows: list[int]) -> None:
        """Computes logits of further rows of the lane's last step; nothing in a stage that has passed all rows on."""
        if not self._backend.always_ends:
            self._operations.use_group(self._groups[lane])
            self._backend.last(*self._rows_of[lane], torch.tensor(rows))

    def finish_steps(self) -> None:
        """Waits for the end of all steps; on a CPU they have ended."""

    def _begin_step(self, plan: StepPlan, num_rows: int, num_sampled: int, row_slots: Sequence[int]) -> None:
        if self._lora is not None:
            self._lora.begin_step(np.array(row_slots, np.int64) if row_slots else None)
        self._backend.begin_step(plan, num_rows, num_sampled)


def sampled_rows(plan: StepPlan, num_sampled: int) -> torch.Tensor:
    """The rows whose logits a plan needs, int64 [num_sampled], padded by the first row."""
    found = SampledRows.of(plan.entries, np.cumsum(plan.entries.num_tokens)).rows
    rows = torch.zeros(num_sampled, dtype=torch.int64)
    rows[: len(found)] = torch.from_numpy(found)
    return rows
