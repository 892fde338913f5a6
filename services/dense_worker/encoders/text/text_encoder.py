"""`TextEncoder`: an encoder of text built from its parts, and `EncoderRun`: its layers over some whole inputs.

Nothing is kept of an input: attention sees all of its tokens at once, and needs no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.common.encoders.encoder_config import EncoderLayer, TextEncoderConfig
from services.common.pooling.pooling_config import PoolingMethod
from services.dense_worker.encoders.packed_attention import PackedSequences, attend

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True, slots=True)
class Affine:
    """weight · x + bias"""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out]"""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class EncoderNorm:
    """LayerNorm (arXiv:1607.06450), perhaps without a bias."""

    weight: torch.Tensor  # [hidden]
    bias: torch.Tensor | None
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, hidden]"""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Its norms are those of sums, or of inputs; the first ModernBERT layer has none before attention."""

    qkv: Affine  # q rows, then k, then v
    o: Affine
    attention_norm: EncoderNorm | None
    up: Affine  # of a gated MLP: what is activated, then what it is multiplied by
    down: Affine
    mlp_norm: EncoderNorm


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A layer of a classifier, in float32."""

    affine: Affine
    activation: str | None
    norm: EncoderNorm | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [n, in] -> [n, out]"""
        x = self.affine.forward(x)
        if self.activation is not None:
            x = _ACTIVATIONS[self.activation](x)
        return x if self.norm is None else self.norm.forward(x)


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """All weights of an encoder, on one device; never written after loading."""

    config: TextEncoderConfig
    embedding: torch.Tensor  # [vocab, hidden]
    positions: torch.Tensor | None  # [num_positions, hidden]
    token_types: torch.Tensor | None  # [num_token_types, hidden]
    embedding_norm: EncoderNorm
    layers: tuple[LayerWeights, ...]
    final_norm: EncoderNorm | None
    distance_bias: torch.Tensor | None  # [num_heads, 2 max_input_tokens - 1], see `attend`
    head: tuple[HeadLayer, ...] = ()  # of a classifier, or dense layers after pooling

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype


class EncoderRun:
    """Some inputs on their way through the layers. Call `advance` until `is_done`, then `pool`."""

    def __init__(
        self, encoder: TextEncoder, inputs: Sequence[Sequence[int]], second_segments: Sequence[int]
    ) -> None:
        """inputs: token ids of each; second_segments: tokens of each before its second text, 0 for one text"""
        self._encoder = encoder
        self._lengths = [len(each) for each in inputs]
        self._next_layer = 0
        device = encoder.device
        self._sequences = PackedSequences(self._lengths, device)
        places = torch.cat([torch.arange(length) for length in self._lengths])
        token_ids = torch.tensor([token_id for each in inputs for token_id in each])
        hidden = F.embedding(_upload(token_ids, device), encoder.embedding)
        if encoder.token_types is not None:
            starts = torch.tensor([each or length for each, length in zip(second_segments, self._lengths, strict=True)])
            types = (places >= starts.repeat_interleave(torch.tensor(self._lengths))).long()
            types = types.clamp(max=len(encoder.token_types) - 1)
            hidden = hidden + F.embedding(_upload(types, device), encoder.token_types)
        on_device = _upload(places, device)
        if encoder.positions is not None:
            rows = _upload(self._position_rows(token_ids, places), device)
            hidden = hidden + F.embedding(rows, encoder.positions)
        self._hidden = encoder.embedding_norm.forward(hidden)
        thetas = {layer.rope_theta for layer in encoder.config.layers if layer.rope_theta is not None}
        self._rotations = {theta: _rotation(on_device, theta, encoder.config.head_dim) for theta in thetas}

    @property
    def num_tokens(self) -> int:
        return sum(self._lengths)

    @property
    def is_done(self) -> bool:
        return self._next_layer == len(self._encoder.layers)

    def advance(self) -> None:
        """Runs the next layer."""
        config, weights = self._encoder.config, self._encoder.layers[self._next_layer]
        layer, x = config.layers[self._next_layer], self._hidden
        if config.has_norms_before:
            normed = x if weights.attention_norm is None else weights.attention_norm.forward(x)
            x = x + self._attention(normed, weights, layer)
            self._hidden = x + self._mlp(weights.mlp_norm.forward(x), weights)
        else:
            assert weights.attention_norm is not None, "only a layer with norms before can lack it"
            x = weights.attention_norm.forward(x + self._attention(x, weights, layer))
            self._hidden = weights.mlp_norm.forward(x + self._mlp(x, weights))
        self._next_layer += 1

    def pool(self, method: PoolingMethod) -> torch.Tensor:
        """The vector of each input, or the values of its labels: float32 [num_inputs, size]."""
        hidden, norm = self._hidden, self._encoder.final_norm
        if norm is not None:
            hidden = norm.forward(hidden)
        if method is PoolingMethod.MEAN:
            pooled = torch.stack([each.float().mean(0) for each in hidden.split(self._lengths)])
        else:
            ends = torch.tensor(self._lengths).cumsum(0)
            rows = ends - 1 if method is PoolingMethod.LAST else ends - torch.tensor(self._lengths)
            pooled = hidden[_upload(rows, hidden.device)].float()
        for layer in self._encoder.head:
            pooled = layer.forward(pooled)
        return pooled

    def _position_rows(self, token_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The row of the table of positions for each token: int64 [n], on the host."""
        offset, padding_id = self._encoder.config.position_offset or 0, self._encoder.config.padding_id
        if padding_id is None or not (token_ids == padding_id).any():
            return places + offset
        counts = (token_ids != padding_id).long()
        parts = [each.cumsum(0) * each + padding_id for each in counts.split(self._lengths)]
        return torch.cat(parts)

    def _attention(self, x: torch.Tensor, weights: LayerWeights, layer: EncoderLayer) -> torch.Tensor:
        qkv = weights.qkv.forward(x).unflatten(1, (3, self._encoder.config.num_heads, -1))
        q, k, v = qkv.unbind(1)
        if layer.rope_theta is not None:
            cos, sin = self._rotations[layer.rope_theta]
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        bias = self._encoder.distance_bias
        attended = attend(q, k, v, self._sequences, window=layer.window, distance_bias=bias)
        return weights.o.forward(attended.flatten(1))

    def _mlp(self, x: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        config, x = self._encoder.config, weights.up.forward(x)
        activate = _ACTIVATIONS[config.activation]
        if config.is_gated:
            activated, gate = x.chunk(2, dim=-1)
            return weights.down.forward(activate(activated) * gate)
        return weights.down.forward(activate(x))


def _rotation(places: torch.Tensor, theta: float, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the angles of each token: float32 [n, 1, head_dim / 2]."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=places.device).float() / head_dim)
    angles = places.float()[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns each pair (i, i + head_dim / 2) of x [n, num_heads, head_dim] (RoPE, arXiv:2104.09864)."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies to a GPU without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
