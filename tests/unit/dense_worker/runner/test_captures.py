"""When a GPU's dense worker captures its graphs: ahead at its start, and never while streams wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.common.batch_buckets import token_buckets
from services.dense_worker.runner import cuda_model_runner
from services.dense_worker.runner.cuda_model_runner import CudaModelRunner
from services.dense_worker.sampling.sampler import Sampler
from tests.support.dense.without_cuda import FakeChannel, TorchWithoutCuda

MAX_NUM_SEQS, MAX_NUM_TOKENS = 4, 32


class CountedGraphs:
    """`StepGraphs` that notes which numbers of rows are captured ahead."""

    ahead: list[list[int]]

    def __init__(self, stream: object, warm_up: object, run: Callable[[Any], None]) -> None: ...

    def capture_all(self, sizes: Iterable[Any]) -> None:
        self.ahead.append([size.num_rows for size in sizes])


@pytest.mark.parametrize("captures_lazily", [False, True])
def test_only_the_first_attachment_captures_ahead(monkeypatch: pytest.MonkeyPatch, captures_lazily: bool) -> None:
    """A worker that attaches again has streams that wait: another worker could not take over from it, say."""
    monkeypatch.setattr(cuda_model_runner, "torch", TorchWithoutCuda())
    monkeypatch.setattr(cuda_model_runner, "StepGraphs", CountedGraphs)
    monkeypatch.setattr(CountedGraphs, "ahead", [], raising=False)
    config: Any = SimpleNamespace(num_layers=1, vocab_size=10, qkv_size=1, attn_size=1, num_middle_kinds=1)
    backend: Any = SimpleNamespace()
    sampler = Sampler(MAX_NUM_SEQS, config.vocab_size, "cpu")
    runner = CudaModelRunner(
        backend, sampler, config, torch.float32, MAX_NUM_SEQS, MAX_NUM_TOKENS, captures_lazily=captures_lazily
    )
    channel: Any = FakeChannel()
    for _ in range(3):
        runner.attach([channel])
    captured = [sorted(set(sizes)) for sizes in CountedGraphs.ahead]
    assert captured == ([] if captures_lazily else [token_buckets(MAX_NUM_SEQS, MAX_NUM_TOKENS)])
