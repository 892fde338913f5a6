"""When a shard on a GPU captures its graphs: with the first rank, before any step needs them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from services.dense_worker.ranks import cuda_shard_runner
from services.dense_worker.ranks.cuda_shard_runner import CudaShardRunner
from services.step import StepPlan
from tests.support.dense.without_cuda import EagerGraphs, FakeChannel, TorchWithoutCuda
from tests.support.plans import make_plan

CPU = torch.device("cpu")


class CountedGraphs(EagerGraphs):
    """`StepGraphs` that notes what is captured and what is replayed."""

    calls: list[tuple[str, int, int, bool]]

    def capture(self, size: tuple[int, int, bool]) -> None:
        self.calls.append(("capture", *size))
        self._run(size)

    def find(self, size: tuple[int, int, bool]) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: self.calls.append(("replay", *size)))


def test_a_size_that_the_first_rank_warms_up_is_captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_shard_runner, "torch", TorchWithoutCuda())
    monkeypatch.setattr(cuda_shard_runner, "StepGraphs", CountedGraphs)
    monkeypatch.setattr(cuda_shard_runner, "upload", lambda array, device: torch.from_numpy(array))
    monkeypatch.setattr(CountedGraphs, "calls", [], raising=False)
    backend: Any = SimpleNamespace(
        begin_step=lambda plan, num_rows, num_sampled: None,
        first=lambda token_ids, qkv, input_embeds=None: torch.zeros(len(token_ids), 1),
        last=lambda attn_out, residual, rows, hidden_out=None: torch.zeros(len(rows), 1),
        always_ends=False,
    )
    used: list[Any] = []
    operations: Any = SimpleNamespace(use_group=used.append, share_tokens=lambda token_ids: None)
    lora = Mock()
    runner = CudaShardRunner(backend, operations, num_layers=1, max_num_tokens=32, device=CPU, lora=lora)
    channels: Any = {0: FakeChannel(), 1: FakeChannel()}
    groups: Any = [SimpleNamespace(capturing=nullcontext, lane=lane) for lane in range(2)]
    runner.attach(channels, groups)
    runner.run_step(StepPlan(0), num_rows=8, num_sampled=4)
    assert CountedGraphs.calls == [("capture", 8, 4, False)]
    runner.run_step(make_plan([(1, 3, 0), (2, 3, 0)]), num_rows=8, num_sampled=4)
    assert CountedGraphs.calls == [("capture", 8, 4, False), ("replay", 8, 4, False)]
    runner.run_step(make_plan([(1, 9, 0)]), num_rows=9, num_sampled=1)  # of a size without a graph
    assert len(CountedGraphs.calls) == 2
    runner.run_step(replace(make_plan([(1, 3, 0)]), lane=1), num_rows=8, num_sampled=4)
    assert len(CountedGraphs.calls) == 2, "the other lane has no graph of that size yet"
    runner.run_step(StepPlan(0, lane=1), num_rows=8, num_sampled=4)
    assert CountedGraphs.calls[2:] == [("capture", 8, 4, False)]
    assert used == [groups[0]] * 3 + [groups[1]] * 2
    runner.run_step(make_plan([(1, 3, 0)]), num_rows=8, num_sampled=4, row_slots=[1] * 3 + [-1] * 5)
    assert len(CountedGraphs.calls) == 3, "rows with adapters run other kernels"
    runner.run_step(StepPlan(0), num_rows=8, num_sampled=4, row_slots=[-1] * 8)
    runner.run_step(make_plan([(1, 3, 0)]), num_rows=8, num_sampled=4, row_slots=[1] * 3 + [-1] * 5)
    assert CountedGraphs.calls[3:] == [("capture", 8, 4, True), ("replay", 8, 4, True)]
    told = [None if each.args[0] is None else each.args[0].tolist() for each in lora.begin_step.call_args_list]
    assert told == [None] * 5 + [[1] * 3 + [-1] * 5, [-1] * 8, [1] * 3 + [-1] * 5]
