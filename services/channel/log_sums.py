"""Where the logarithms of sums of exponentials cross the seam, of rows whose keys several attention workers have."""

from __future__ import annotations

import torch


def log_sums_of(qkv: torch.Tensor, q_size: int, num_heads: int) -> torch.Tensor:
    """A view of rows of qkv [n, qkv_size]: float32 [n, num_heads], in place of the first keys.

    There is room for them if keys and values of a row have 4 * num_heads bytes at least (`check_split_context`).
    """
    num_columns = num_heads * torch.float32.itemsize // qkv.itemsize
    return qkv[:, q_size : q_size + num_columns].view(torch.float32)
