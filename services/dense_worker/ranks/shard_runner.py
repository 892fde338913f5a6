"""`ShardRunner`: runs the steps of a shard as the first rank commands. Owned by the shard's engine thread."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from services.channel import Channel
from services.dense_worker.backends import DenseBackend
from services.dense_worker.ranks.group import RankGroup
from services.dense_worker.ranks.leading_backend import ShardOperations
from services.dense_worker.runner.model_runner import LayerRun
from services.dense_worker.runner.step_input import SampledRows
from services.step import StepPlan


class ShardRunner:
    """Keeps no sequence: a plan says how many rows a step has, and the first rank gives their tokens."""

    def __init__(self, backend: DenseBackend, operations: ShardOperations, num_layers: int) -> None:
        """`operations`: those of the backend."""
        self._backend = backend
        self._operations = operations
        self._num_layers = num_layers
        self._channels: Mapping[int, Channel] = {}
        self._attn_out: torch.Tensor | None = None  # of the last step
        self._residual: torch.Tensor | None = None

    def attach(self, channels: Mapping[int, Channel], group: RankGroup) -> None:
        """Makes later steps run on these channels, by lane, and with these ranks."""
        self._channels = channels
        self._operations.use_group(group)

    @torch.inference_mode()
    def run_step(self, plan: StepPlan, num_rows: int, num_sampled: int) -> None:
        """Runs all layers. Raises the errors of `Channel.wait` and of the group."""
        channel = self._channels[plan.lane]
        self._backend.begin_step(plan, num_rows, num_sampled)
        token_ids = torch.zeros(num_rows, dtype=torch.int64)
        self._operations.share_tokens(token_ids)
        layers = LayerRun(self._backend, channel, self._num_layers)
        layers.begin(token_ids)
        _, self._residual = layers.finish(sampled_rows(plan, num_sampled))
        self._attn_out = channel.attn_out[:num_rows]

    @torch.inference_mode()
    def compute_rows(self, rows: list[int]) -> None:
        """Computes logits of further rows of the last step; nothing in a stage that has passed all rows on."""
        assert self._attn_out is not None and self._residual is not None, "a step has run"
        if not self._backend.always_ends:
            self._backend.last(self._attn_out, self._residual, torch.tensor(rows))


def sampled_rows(plan: StepPlan, num_sampled: int) -> torch.Tensor:
    """The rows whose logits a plan needs, int64 [num_sampled], padded by the first row."""
    found = SampledRows.of(plan.entries, np.cumsum(plan.entries.num_tokens)).rows
    rows = torch.zeros(num_sampled, dtype=torch.int64)
    rows[: len(found)] = torch.from_numpy(found)
    return rows
