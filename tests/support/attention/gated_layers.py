"""Random gated delta layers for tests: weights, a KV cache with their states, rows of the seam, and true values."""

from __future__ import annotations

import numpy as np
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_recurrent_gated_delta_rule

from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.state_group import StateWave, StepStates
from services.attn_worker.cache.step_metadata import StepMetadata, build_step_metadata
from services.common.attention.learned import RecurrenceWeights
from services.common.families.shape import GatedDelta
from services.common.model_config import LayerHeads


def recurrent_step(*waves: StateWave) -> StepMetadata:
    """A step of which only recurrent layers know anything."""
    none = np.zeros(0, np.int64)
    return build_step_metadata(none, none, none, np.zeros((0, 1), np.int32), 1).with_other(StepStates(waves))


def make_gated_spec(sizes: GatedDelta, num_slots: int, num_layers: int = 1) -> KVCacheSpec:
    """A cache for gated delta layers alone."""
    heads = LayerHeads(1, 1, 4, recurrence=sizes)
    return KVCacheSpec(
        1, 4, 1, 4, torch.float32, (None,) * num_layers, layer_heads=(heads,) * num_layers, num_state_slots=num_slots
    )


def random_gated_weights(sizes: GatedDelta, seed: int = 0) -> RecurrenceWeights:
    """Weights as models have them: decays from almost none to almost everything."""
    random = np.random.default_rng(seed)
    conv = random.normal(size=(sizes.conv_dim, sizes.conv_size)) / 2
    a_log = np.log(random.uniform(0.01, 16, sizes.num_value_heads))
    dt_bias = random.normal(size=sizes.num_value_heads)
    return RecurrenceWeights(conv.astype("<f4").tobytes(), tuple(a_log.tolist()), tuple(dt_bias.tolist()))


def random_rows(sizes: GatedDelta, num_tokens: int, seed: int = 0) -> torch.Tensor:
    """float32 [num_tokens, row_size]."""
    return torch.randn(num_tokens, sizes.row_size, generator=torch.Generator().manual_seed(seed))


def true_values(rows: torch.Tensor, weights: RecurrenceWeights, sizes: GatedDelta) -> torch.Tensor:
    """What `transformers` makes of a whole sequence, token by token: [num_tokens, value_size]."""
    conv = torch.from_numpy(np.frombuffer(weights.conv, "<f4").copy()).view(sizes.conv_dim, sizes.conv_size)
    mixed = causal_conv1d_fn(rows[None, :, : sizes.conv_dim].transpose(1, 2), conv.to(rows.dtype), activation="silu")
    query, key, value = mixed.transpose(1, 2).split((sizes.key_size, sizes.key_size, sizes.value_size), dim=-1)
    b, a = rows[None, :, sizes.conv_dim :].float().split(sizes.num_value_heads, dim=-1)
    log_decay = -torch.tensor(weights.a_log).exp() * torch.nn.functional.softplus(a + torch.tensor(weights.dt_bias))
    values, _ = torch_recurrent_gated_delta_rule(
        query.unflatten(-1, (-1, sizes.key_dim)),
        key.unflatten(-1, (-1, sizes.key_dim)),
        value.unflatten(-1, (-1, sizes.value_dim)),
        log_decay,
        b.sigmoid(),
        use_qk_l2norm_in_kernel=True,
    )
    return values[0].flatten(1)
