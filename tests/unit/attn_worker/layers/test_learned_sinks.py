"""Learned sinks: a logit per layer and head that joins each softmax and adds no value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.attention.learned import Learned
from tests.support.attention.harness import Harness

SINKS = torch.linspace(-3.0, 4.0, 2 * 8).view(2, 8)  # of two layers with eight heads
EXTREMES = torch.tensor([-1e4, -60.0, 0.0, 20.0, 60.0, 90.0, 300.0, 1e4]).expand(2, -1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_in_every_kind_of_step(tmp_path: Path, heads: tuple[int, int], dtype: torch.dtype) -> None:
    harness = Harness(tmp_path, heads, dtype, windows=(None, 6), sinks=SINKS)
    for seq_id, prompt_len in enumerate([5, 1, 23]):
        harness.open(seq_id, prompt_len)
    harness.check((0, 5), (2, 10))
    harness.check((1, 1), (2, 13), (0, 1))
    harness.check((0, 1), (1, 1), (2, 1))
    harness.check((2, 1))


def test_sinks_far_above_and_below_all_scores(tmp_path: Path) -> None:
    harness = Harness(tmp_path, sinks=EXTREMES)
    harness.open(0, 12)
    harness.check((0, 12))
    harness.check((0, 1))


def test_later_sinks_take_the_place_of_earlier_ones(tmp_path: Path) -> None:
    harness = Harness(tmp_path, sinks=SINKS)
    harness.open(0, 4)
    harness.check((0, 4))
    harness.sinks = -SINKS
    harness.backend.use_learned(Learned(sinks=harness.sinks.tolist()))
    harness.check((0, 1))
