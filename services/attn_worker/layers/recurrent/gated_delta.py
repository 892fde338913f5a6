"""The gated delta rule (arXiv:2412.06464, equation 10) and the short convolution before it, in torch operations.

The rule keeps a matrix S for each value head, here [key_dim, value_dim]. A token with key k, value v, decay exp(g) and
strength beta makes S = exp(g) S + k (beta (v - exp(g) S^T k))^T; its output is S^T q. All is in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import silu, softplus

from services.common.families.shape import GatedDelta

CHUNK_SIZE = 64  # tokens that one triangular system is made for
NORM_EPS = 1e-6  # under the square root of the norms of q and k, as `transformers` has it


class RuleInputs(NamedTuple):
    """What the rule gets, float32, with any leading dimensions; heads are value heads, before the tokens."""

    query: torch.Tensor  # [..., num_heads, num_tokens, key_dim], of length 1 / sqrt(key_dim)
    key: torch.Tensor  # the same shape, of length 1
    value: torch.Tensor  # [..., num_heads, num_tokens, value_dim]
    log_decay: torch.Tensor  # [..., num_heads, num_tokens], not above 0
    strength: torch.Tensor  # the same shape, 0 to 1


def convolve(
    rows: torch.Tensor,
    past: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_activated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The convolution of each channel over its last tokens, then SiLU if it `is_activated`, and the new past.

    rows: [n, num_tokens, conv_dim]; output: the same shape and dtype, to which sums and SiLU are rounded.
    past: float32 [n, conv_size - 1, conv_dim], the rows before. weight: float32 [conv_dim, conv_size], bias [conv_dim].
    """
    num_tokens, conv_size = rows.shape[1], weight.shape[1]
    all_rows = torch.cat((past, rows.float()), dim=1)
    summed = sum(all_rows[:, tap : tap + num_tokens] * weight[:, tap] for tap in range(conv_size))
    if bias is not None:
        summed = summed + bias
    output = summed.to(rows.dtype)
    if is_activated:
        output = silu(output.float()).to(rows.dtype)
    return output, all_rows[:, num_tokens:]


def rule_inputs(
    rows: torch.Tensor, convolved: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, sizes: GatedDelta
) -> RuleInputs:
    """The inputs of the rule from rows of the seam, [n, num_tokens, row_size], whose q, k and v are `convolved`.

    a_log, dt_bias: float32 [num_value_heads].
    """
    query, key, value = convolved.float().split((sizes.key_size, sizes.key_size, sizes.value_size), dim=-1)
    query, key = (_normalized(each.unflatten(-1, (-1, sizes.key_dim))) for each in (query, key))
    repeats = sizes.num_value_heads // sizes.num_key_heads
    query, key = (each.repeat_interleave(repeats, dim=-2) for each in (query * sizes.key_dim**-0.5, key))
    b, a = rows[..., sizes.conv_dim :].float().split((sizes.num_value_heads, sizes.num_value_heads), dim=-1)
    return RuleInputs(
        query.transpose(-2, -3),
        key.transpose(-2, -3),
        value.unflatten(-1, (-1, sizes.value_dim)).transpose(-2, -3),
        (-a_log.exp() * softplus(a + dt_bias)).transpose(-1, -2),
        b.sigmoid().transpose(-1, -2),
    )


def run_token(inputs: RuleInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each sequence. Returns the output, [n, num_heads, 1, value_dim], and the new state.

    state: [n, num_heads, key_dim, value_dim]; not modified.
    """
    decayed = state * inputs.log_decay.exp().unsqueeze(-1)
    change = inputs.strength.unsqueeze(-1) * (inputs.value - inputs.key @ decayed)
    decayed.addcmul_(inputs.key.transpose(-1, -2), change)
    return inputs.query @ decayed, decayed


def run_chunks(inputs: RuleInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Any number of tokens, in chunks (section 3.3 of the paper). Returns the output, of value's shape, and the state.

    In a chunk that starts with state S, let G be the sums of the logarithms of decays, and K, Q, V the rows of tokens.
    The changes U that the tokens make solve (I + L) U = beta (V - exp(G) K S), where L is the strictly lower triangle
    of beta exp(G_i - G_j) K K^T. state: [n, num_heads, key_dim, value_dim]; not modified.
    """
    outputs = []
    for start in range(0, inputs.value.shape[-2], CHUNK_SIZE):
        end = start + CHUNK_SIZE
        query, key, value = (each[..., start:end, :] for each in inputs[:3])
        strength = inputs.strength[..., start:end].unsqueeze(-1)
        log_decay = inputs.log_decay[..., start:end].cumsum(-1)
        decay = log_decay.exp().unsqueeze(-1)
        # Exponents above the diagonal are positive and could overflow, so they are cut before exp.
        pairs = (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).clamp_(max=0.0).exp_()
        system = strength * pairs * (key @ key.transpose(-1, -2))
        target = strength * (value - decay * (key @ state))
        change = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
        scores = (pairs * (query @ key.transpose(-1, -2))).tril_()
        outputs.append(decay * (query @ state) + scores @ change)
        last = log_decay[..., -1:]
        to_end = (last - log_decay).exp().unsqueeze(-1)
        state = last.exp().unsqueeze(-1) * state + (to_end * key).transpose(-1, -2) @ change
    return torch.cat(outputs, dim=-2), state


def _normalized(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + NORM_EPS)
