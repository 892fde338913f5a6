"""`SplitNorm`: an RMSNorm between two products of few rows, computed by these. A kernel of its own takes 2 µs.

The product that adds to the residual also stores the residual times the norm's weight, and sums of the squares of its
features. The next product multiplies those rows, and its own sums by the norm's factor of each row. So the normalised
row is rounded once, where the norm itself rounds twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_TILE_SIZE = 64  # features of a tile, or fewer


@dataclass(frozen=True, slots=True)
class SplitNorm:
    """The norm of n rows, of which the first product writes `rows` and `squares`, and the second reads them."""

    weight: torch.Tensor  # [size]
    eps: float
    rows: torch.Tensor  # [n, size], contiguous: the residual times `weight`
    squares: torch.Tensor  # float32 [64, num_squares(size)], one for each tile of a row; zeros behind them


def num_squares(size: int) -> int:
    """Columns of `SplitNorm.squares`, and the most tiles."""
    return -(-size // _TILE_SIZE**2) * _TILE_SIZE
