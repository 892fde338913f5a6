"""The dense stroke between two attention calls, defined once for torch, CUDA graphs, ONNX and TensorRT.

A model of L layers is First, L - 1 times Middle (one shape, other weights), Last. The modules own no
parameters: weights are inputs, in the order of `weight_names`, fetched by `select`. Numerics follow
Hugging Face: the residual stays in the model's dtype, norms compute in float32.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from services.common.model_config import ModelConfig
from services.dense_worker.model.weights import LayerWeights, ModelWeights

Weights = dict[str, torch.Tensor]  # by name of the LayerWeights or ModelWeights field


def segment_names(config: ModelConfig) -> tuple[str, ...]:
    """The segments of a model; a single layer needs no `middle`."""
    return ("first", "middle", "last") if config.num_layers > 1 else ("first", "last")


class _Segment(nn.Module):
    """What the segments share: the two halves around an attention call, and which weights each needs."""

    weight_names: tuple[str, ...]  # the weight inputs of forward, in order; depends on the config only

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        optional = {
            "qkv_bias": config.qkv_bias,
            "q_norm": config.qk_norm,
            "k_norm": config.qk_norm,
            "o_bias": config.o_bias,
            "gate_up_bias": config.mlp_bias,
            "down_bias": config.mlp_bias,
        }
        before = ("input_norm", "qkv_weight", "qkv_bias", "q_norm", "k_norm")
        after = ("o_weight", "o_bias", "post_norm")
        after += ("gate_up_weight", "gate_up_bias", "down_weight", "down_bias")
        self._names_before = tuple(name for name in before if optional.get(name, True))
        self._names_after = tuple(name for name in after if optional.get(name, True))

    def _by_name(self, weights: tuple[torch.Tensor, ...]) -> Weights:
        return dict(zip(self.weight_names, weights, strict=True))

    def _before_attention(self, residual: torch.Tensor, w: Weights, qkv_out: torch.Tensor | None) -> torch.Tensor:
        """Norm, merged projection, q/k norm: residual [n, hidden] -> qkv [n, qkv_size]."""
        config = self.config
        normed = _rms_norm(residual, w["input_norm"], config.rms_norm_eps)
        qkv = _linear(normed, w["qkv_weight"], w.get("qkv_bias"), qkv_out)
        if not config.qk_norm:
            return qkv
        q, k, v = qkv.split([config.attn_size, config.kv_size, config.kv_size], dim=1)
        normed_q = self._head_norm(q, config.num_heads, w["q_norm"])
        normed_k = self._head_norm(k, config.num_kv_heads, w["k_norm"])
        if qkv_out is None:
            return torch.cat([normed_q, normed_k, v], dim=1)
        q.copy_(normed_q)
        k.copy_(normed_k)
        return qkv

    def _after_attention(self, attn_out: torch.Tensor, residual: torch.Tensor, w: Weights) -> torch.Tensor:
        """o_proj, add, norm, SwiGLU, add: attn_out [n, attn_size], residual [n, hidden] -> residual."""
        residual = residual + _linear(attn_out, w["o_weight"], w.get("o_bias"))
        normed = _rms_norm(residual, w["post_norm"], self.config.rms_norm_eps)
        gate_up = _linear(normed, w["gate_up_weight"], w.get("gate_up_bias"))
        gate, up = gate_up.split(self.config.intermediate_size, dim=1)
        return residual + _linear(F.silu(gate) * up, w["down_weight"], w.get("down_bias"))

    def _head_norm(self, heads: torch.Tensor, num_heads: int, weight: torch.Tensor) -> torch.Tensor:
        """Norm of each head on its own: heads [n, num_heads * head_dim], n >= 1, same shape out."""
        split = heads.view(-1, num_heads, self.config.head_dim)
        return _rms_norm(split, weight, self.config.rms_norm_eps).view(-1, num_heads * self.config.head_dim)


class First(_Segment):
    """Token ids -> embedding, norm, qkv of layer 0."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.weight_names = ("embed", *self._names_before)

    def select(self, weights: ModelWeights) -> tuple[torch.Tensor, ...]:
        """This segment's weights, in the order of `weight_names`."""
        return (weights.embed, *_get(weights.layers[0], self._names_before))

    def forward(
        self, token_ids: torch.Tensor, *weights: torch.Tensor, qkv_out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """token_ids int64 [n] -> qkv [n, qkv_size], residual [n, hidden].

        Where `qkv_out` is given, qkv is that tensor, written in place.
        """
        w = self._by_name(weights)
        residual = F.embedding(token_ids, w["embed"])
        return self._before_attention(residual, w, qkv_out), residual


class Middle(_Segment):
    """o_proj and MLP of one layer, norm and qkv of the next; the same module between any two layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.weight_names = self._names_after + self._names_before

    def select(self, weights: ModelWeights, layer: int) -> tuple[torch.Tensor, ...]:
        """The weights between the attention of `layer` and of `layer + 1`, in the order of `weight_names`."""
        this, following = weights.layers[layer], weights.layers[layer + 1]
        return _get(this, self._names_after) + _get(following, self._names_before)

    def forward(
        self,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        *weights: torch.Tensor,
        qkv_out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """attn_out [n, attn_size], residual [n, hidden] -> qkv [n, qkv_size], residual [n, hidden].

        Where `qkv_out` is given, qkv is that tensor, written in place.
        """
        w = self._by_name(weights)
        residual = self._after_attention(attn_out, residual, w)
        return self._before_attention(residual, w, qkv_out), residual


class Last(_Segment):
    """o_proj and MLP of the last layer, final norm and lm_head, for those rows that need logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.weight_names = (*self._names_after, "final_norm", "lm_head")

    def select(self, weights: ModelWeights) -> tuple[torch.Tensor, ...]:
        """This segment's weights, in the order of `weight_names`."""
        return (*_get(weights.layers[-1], self._names_after), weights.final_norm, weights.lm_head)

    def forward(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        """attn_out [n, attn_size], residual [n, hidden], rows int64 [r] -> logits float32 [r, vocab]."""
        w = self._by_name(weights)
        attn_out, residual = attn_out.index_select(0, rows), residual.index_select(0, rows)
        residual = self._after_attention(attn_out, residual, w)
        normed = _rms_norm(residual, w["final_norm"], self.config.rms_norm_eps)
        return _linear(normed, w["lm_head"]).float()


def bind_weights(config: ModelConfig, weights: ModelWeights) -> dict[str, list[Weights]]:
    """What each segment takes as weights, by input name; a list of one, but for `middle` one for each layer."""
    first, middle, last = First(config), Middle(config), Last(config)
    return {
        "first": [first._by_name(first.select(weights))],
        "middle": [middle._by_name(middle.select(weights, layer)) for layer in range(config.num_layers - 1)],
        "last": [last._by_name(last.select(weights))],
    }


def _get(layer: LayerWeights, names: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(getattr(layer, name) for name in names)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension (Zhang & Sennrich, 2019), rounded to x's dtype before the weight."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [n, in], weight [out, in] -> [n, out], in `out` where given."""
    if out is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)
