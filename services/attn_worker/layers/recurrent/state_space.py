"""The recurrence of Mamba 2 (arXiv:2405.21060, section 6) in torch operations, all in float32.

It keeps a matrix S for each head, here [state_size, head_dim]. A token with input x, keys B, queries C and time step t
makes S = exp(-exp(a_log) t) S + B (t x)^T; its output is S^T C + d x.
"""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from services.common.families.shape import StateSpace

CHUNK_SIZE = 64  # tokens whose scores are one matrix


def run_state_space(
    rows: torch.Tensor,  # [n, num_tokens, row_size], of the seam
    convolved: torch.Tensor,  # [n, num_tokens, conv_dim]: their x, B and C after the convolution
    state: torch.Tensor,  # float32 [n, num_heads, state_size, head_dim]; not modified
    a_log: torch.Tensor,  # float32 [num_heads], as the next two
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    sizes: StateSpace,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Any number of tokens of each sequence -> the output, [n, num_heads, num_tokens, head_dim], and the state."""
    group_size = sizes.num_groups * sizes.state_size
    x, keys, queries = convolved.float().split((sizes.value_size, group_size, group_size), dim=-1)
    repeats = sizes.num_heads // sizes.num_groups
    keys, queries = (
        each.unflatten(-1, (-1, sizes.state_size)).repeat_interleave(repeats, dim=-2).transpose(-2, -3)
        for each in (keys, queries)
    )
    x = x.unflatten(-1, (-1, sizes.head_dim)).transpose(-2, -3)
    time_steps = softplus(rows[..., sizes.conv_dim :].float() + dt_bias).clamp(*sizes.time_step_limits)
    time_steps = time_steps.transpose(-1, -2)  # [n, num_heads, num_tokens]
    log_decay = -a_log.exp()[:, None] * time_steps
    output, state = run_chunks(queries, keys, time_steps.unsqueeze(-1) * x, log_decay, state)
    return output + d[:, None, None] * x, state


def run_chunks(
    queries: torch.Tensor,  # [..., num_heads, num_tokens, state_size], as keys
    keys: torch.Tensor,
    values: torch.Tensor,  # [..., num_heads, num_tokens, head_dim]
    log_decay: torch.Tensor,  # [..., num_heads, num_tokens], not above 0
    state: torch.Tensor,  # [..., num_heads, state_size, head_dim]; not modified
) -> tuple[torch.Tensor, torch.Tensor]:
    """S = exp(log_decay) S + key value^T for each token, and the outputs S^T query: of values' shape, and the state.

    In a chunk, let G be the sums of the logarithms of decays. A token then sees the state before the chunk times
    exp(G), and an earlier token j of the chunk times exp(G - G_j).
    """
    outputs = []
    for start in range(0, values.shape[-2], CHUNK_SIZE):
        end = start + CHUNK_SIZE
        query, key, value = (each[..., start:end, :] for each in (queries, keys, values))
        sums = log_decay[..., start:end].cumsum(-1)
        # Exponents above the diagonal are positive and could overflow, so they are cut before exp.
        pairs = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).clamp_(max=0.0).exp_()
        scores = (pairs * (query @ key.transpose(-1, -2))).tril_()
        outputs.append(sums.exp().unsqueeze(-1) * (query @ state) + scores @ value)
        last = sums[..., -1:]
        to_end = (last - sums).exp().unsqueeze(-1)
        state = last.exp().unsqueeze(-1) * state + (to_end * key).transpose(-1, -2) @ value
    return torch.cat(outputs, dim=-2), state
