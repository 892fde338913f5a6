"""Random layers with a state space or a short convolution for tests: weights, and what the formulas give."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from services.common.attention.learned import RecurrenceWeights
from services.common.families.shape import SelectiveScan, ShortConvolution, StateSpace

Sizes = StateSpace | ShortConvolution | SelectiveScan


def random_state_space_weights(sizes: Sizes, seed: int = 0) -> RecurrenceWeights:
    """Decays from almost none to almost everything."""
    random = np.random.default_rng(seed)

    def in_bytes(field: str) -> bytes:
        return (random.normal(size=sizes.num_weights[field]) / 2).astype("<f4").tobytes()

    if isinstance(sizes, SelectiveScan):
        a_logs = np.log(random.uniform(0.01, 8, sizes.num_weights["a_logs"])).astype("<f4").tobytes()
        return RecurrenceWeights(d=tuple(random.normal(size=sizes.num_channels).tolist()), a_logs=a_logs)
    conv, conv_bias = in_bytes("conv"), in_bytes("conv_bias")
    if isinstance(sizes, ShortConvolution):
        return RecurrenceWeights(conv, conv_bias=conv_bias)
    a_log = np.log(random.uniform(0.01, 8, sizes.num_heads))
    dt_bias, d = random.normal(size=(2, sizes.num_heads))
    return RecurrenceWeights(conv, tuple(a_log.tolist()), tuple(dt_bias.tolist()), conv_bias, tuple(d.tolist()))


def true_outputs(rows: torch.Tensor, weights: RecurrenceWeights, sizes: Sizes) -> torch.Tensor:
    """A whole sequence, token by token in float64: rows [num_tokens, row_size] -> [num_tokens, value_size]."""
    rows, num_tokens = rows.double(), len(rows)
    if isinstance(sizes, SelectiveScan):
        return _true_scan(rows, weights, sizes)
    conv = torch.from_numpy(np.frombuffer(weights.conv, "<f4").astype(np.float64)).view(sizes.conv_dim, -1)
    padded = F.pad(rows[:, : sizes.conv_dim], (0, 0, sizes.conv_size - 1, 0))
    mixed = torch.stack([(padded[i : i + sizes.conv_size] * conv.t()).sum(0) for i in range(num_tokens)])
    if weights.conv_bias:
        mixed += torch.from_numpy(np.frombuffer(weights.conv_bias, "<f4").astype(np.float64))
    if isinstance(sizes, ShortConvolution):
        return F.silu(mixed) if sizes.is_activated else mixed
    x, b, c = F.silu(mixed).split([sizes.value_size, *[sizes.num_groups * sizes.state_size] * 2], dim=1)
    x = x.view(num_tokens, sizes.num_heads, sizes.head_dim)
    b, c = (
        each.view(num_tokens, sizes.num_groups, -1).repeat_interleave(sizes.num_heads // sizes.num_groups, 1)
        for each in (b, c)
    )
    steps = F.softplus(rows[:, sizes.conv_dim :] + torch.tensor(weights.dt_bias)).clamp(*sizes.time_step_limits)
    rates = torch.tensor(weights.a_log, dtype=torch.float64).exp()
    state, outputs = torch.zeros(sizes.num_heads, sizes.head_dim, sizes.state_size, dtype=torch.float64), []
    for token in range(num_tokens):
        decay = (-rates * steps[token]).exp()[:, None, None]
        state = decay * state + steps[token][:, None, None] * x[token][:, :, None] * b[token][:, None, :]
        outputs.append((state * c[token][:, None, :]).sum(-1) + torch.tensor(weights.d)[:, None] * x[token])
    return torch.stack(outputs).flatten(1)


def _true_scan(rows: torch.Tensor, weights: RecurrenceWeights, sizes: SelectiveScan) -> torch.Tensor:
    rates = torch.from_numpy(np.frombuffer(weights.a_logs, "<f4").astype(np.float64)).view(sizes.state_shape).exp()
    x, b, c, steps = rows.split([sizes.num_channels, *[sizes.state_size] * 2, sizes.num_channels], dim=1)
    steps, state, outputs = F.softplus(steps), torch.zeros(sizes.state_shape, dtype=torch.float64), []
    for token in range(len(rows)):
        state = (-rates * steps[token][:, None]).exp() * state + torch.outer(steps[token] * x[token], b[token])
        outputs.append(state @ c[token] + torch.tensor(weights.d) * x[token])
    return torch.stack(outputs)
