"""`RowDeltas`: what adapters add to a linear layer's product, for the kernels that add it themselves."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowDeltas(NamedTuple):
    """The products with B that are added to a linear layer's: those of each row with its adapter's."""

    hidden: torch.Tensor  # x A^T, x's dtype [num_projections, most rows, ranks of all slots, and zeros behind them]
    a: torch.Tensor  # [num_projections, groups of ranks, num_slots, RANK_STEP, in_features]
    b: torch.Tensor  # [weight's rows, ranks of all slots], scaled
    group_size: int  # ranks that lie together: the first ones of all slots, and so on
    num_tiles: int  # of A, RANK_STEP ranks each
    ranks: torch.Tensor  # int32 [num_slots, num_projections], multiples of RANK_STEP; 0: no delta
    column_starts: torch.Tensor  # int32 [num_projections + 1]: the columns of each projection
    first_features: tuple[int, ...]  # the same without the last, on the host
    row_slots: torch.Tensor  # int32 [n]: the slot of each row or -1
    sums: torch.Tensor  # float32: those of `hidden` over parts of in_features
    num_parts_done: torch.Tensor  # int32 [num_tiles], zeros
    counters: torch.Tensor  # int32 [2]: tiles of A whose sums are in `hidden`, and, from 1 on, x is complete
