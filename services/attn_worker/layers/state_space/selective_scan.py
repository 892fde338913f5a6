"""The recurrence of Mamba 1 (arXiv:2312.00752, section 3) in torch operations, all in float32.

It keeps a vector for each channel, [state_size]. A token with inputs x, time steps t, keys B and queries C makes each
of them s = exp(-exp(a_logs) t) s + t x B; the channel's output is s C + d x.
"""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from services.common.families.shape import SelectiveScan


def run_selective_scan(
    rows: torch.Tensor,  # [n, num_tokens, row_size], of the seam
    state: torch.Tensor,  # float32 [n, num_channels, state_size]; not modified
    a_logs: torch.Tensor,  # float32 [num_channels, state_size]
    d: torch.Tensor,  # float32 [num_channels]
    sizes: SelectiveScan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Any number of tokens of each sequence, one by one -> the output, [n, num_tokens, num_channels], and the state."""
    widths = (sizes.num_channels, sizes.state_size, sizes.state_size, sizes.num_channels)
    x, keys, queries, time_steps = rows.float().split(widths, dim=-1)
    time_steps = softplus(time_steps)
    inputs, rates, outputs = time_steps * x, -a_logs.exp(), []
    for token in range(rows.shape[1]):
        decay = (time_steps[:, token, :, None] * rates).exp_()
        state = decay * state + inputs[:, token, :, None] * keys[:, token, None, :]
        outputs.append((state @ queries[:, token, :, None]).squeeze(-1))
    return torch.stack(outputs, dim=1) + d * x, state
