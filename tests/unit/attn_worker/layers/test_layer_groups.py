"""TorchAttention with blocks of their own for layers with a window, in every format, compared with dense attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.attention.harness import BLOCK_SIZE, Harness
from tests.support.plans import make_window_group

WINDOWS = (7, None, 5)
GROUP = make_window_group(max(WINDOWS[::2]), BLOCK_SIZE, 3, 20)


def check_all_kinds_of_steps(harness: Harness) -> None:
    """Chunks, single tokens and a fork, far beyond the windows. Each row of each layer is compared."""
    harness.open(1, 50)
    harness.open(2, 20)
    harness.check((1, 18), (2, 2))
    harness.check((1, 2), (2, 18))
    harness.check((1, 20), (2, 1))
    harness.check((2, 1), (3, 1), fork=(2, 3))
    for _ in range(9):
        harness.check((1, 5), (3, 1), (2, 1))
    assert harness.cache.pools["windows"].num_used_blocks < harness.cache.num_used_blocks
    harness.cache.check_integrity()


@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn, torch.bfloat16])
def test_every_format_and_layers_with_another_one(tmp_path: Path, cache_dtype: torch.dtype | None) -> None:
    exceptions = {} if cache_dtype is None else {2: torch.float32}
    options = {"windows": WINDOWS, "window_blocks": GROUP, "num_hidden_layers": len(WINDOWS)}
    check_all_kinds_of_steps(Harness(tmp_path, cache_dtype=cache_dtype, exceptions=exceptions, **options))


def test_learned_sinks(tmp_path: Path) -> None:
    sinks = torch.randn(len(WINDOWS), 8, generator=torch.Generator().manual_seed(2))
    options = {"windows": WINDOWS, "window_blocks": GROUP, "num_hidden_layers": len(WINDOWS)}
    check_all_kinds_of_steps(Harness(tmp_path, sinks=sinks, **options))
