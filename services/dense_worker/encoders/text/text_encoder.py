"""`TextEncoder`: an encoder of text built from its parts, and `EncoderRun`: its layers over some whole inputs.

Nothing is kept of an input: attention sees all of its tokens at once, and needs no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional as F

from services.common.encoders.encoder_config import EncoderLayer, TextEncoderConfig
from services.common.pooling.pooling_config import PoolingMethod, TokenHead
from services.dense_worker.encoders.packed_attention import PackedSequences, PositionTerms, attend
from services.dense_worker.encoders.text.encoder_operations import EncoderOperations, Rotation
from services.dense_worker.kernels.linear.activation import ACTIVATIONS, MlpActivation
from services.dense_worker.kernels.norm.norm import HeadNorms, Norm
from services.dense_worker.sampling.upload import upload

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {**ACTIVATIONS, "tanh": torch.tanh}


@dataclass(frozen=True, slots=True)
class Affine:
    """weight · x + bias"""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out]"""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: attention and an MLP, whose results are each added to the residual, and what is done to the sums.

    `attention_norm` and `mlp_norm` normalise the sums behind them. BERT's normalised sums are the next residual. With
    norms before each half of a layer (ModernBERT), they are only what the next half reads: that of the MLP is the next
    layer's, or the final one.
    """

    qkv: Affine  # q rows, then k, then v
    head_norms: HeadNorms | None
    positions: PositionTerms | None
    o: Affine
    attention_norm: Norm
    up: Affine  # of a gated MLP: what is activated, then what it is multiplied by
    down: Affine
    mlp_norm: Norm
    after_attention: Norm | None  # of what attention adds
    after_mlp: Norm | None


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A layer of a classifier, in float32."""

    affine: Affine
    activation: str | None
    norm: Norm | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [n, in] -> [n, out]"""
        x = self.affine.forward(x)
        if self.activation is not None:
            x = _ACTIVATIONS[self.activation](x)
        return x if self.norm is None else self.norm.normalize(x)


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """All weights of an encoder, on one device; never written after loading."""

    config: TextEncoderConfig
    operations: EncoderOperations
    activation: MlpActivation
    embedding: torch.Tensor  # [vocab, width]
    positions: torch.Tensor | None  # [num_positions, width]
    token_types: torch.Tensor | None  # [num_token_types, width]
    projection: Affine | None  # from the width to the hidden size; None: they are equal
    embedding_norm: Norm | None
    first_norm: Norm | None  # of what the first layer reads; None: it reads the residual itself
    layers: tuple[LayerWeights, ...]
    distance_bias: torch.Tensor | None  # [num_heads, 2 max_input_tokens - 1], see `attend`
    head: tuple[HeadLayer, ...]  # of a classifier, or dense layers after pooling
    token_heads: Mapping[TokenHead, HeadLayer] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype


class EncoderRun:
    """Some inputs on their way through the layers. Call `advance` until `is_done`, then `pool` or `tokens`.

    Waits for no GPU.
    """

    def __init__(
        self, encoder: TextEncoder, inputs: Sequence[Sequence[int]], second_segments: Sequence[int]
    ) -> None:
        """inputs: token ids of each; second_segments: tokens of each before its second text, 0 for one text"""
        self._encoder = encoder
        self.lengths = [len(each) for each in inputs]
        self._next_layer = 0
        device, lengths = encoder.device, np.array(self.lengths)
        self._sequences = PackedSequences(self.lengths, device)
        places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        token_ids = np.concatenate([np.asarray(each, np.int64) for each in inputs])
        hidden = F.embedding(upload(token_ids, device), encoder.embedding)
        if encoder.config.embedding_multiplier != 1.0:
            hidden = hidden * torch.tensor(encoder.config.embedding_multiplier, dtype=hidden.dtype)
        if encoder.token_types is not None:
            starts = np.array([each or length for each, length in zip(second_segments, self.lengths, strict=True)])
            types = (places >= np.repeat(starts, lengths)).astype(np.int64)
            hidden = hidden + F.embedding(
                upload(types.clip(max=len(encoder.token_types) - 1), device), encoder.token_types
            )
        if encoder.positions is not None:
            hidden = hidden + F.embedding(upload(self._position_rows(token_ids, places), device), encoder.positions)
        if encoder.projection is not None:
            hidden = encoder.projection.forward(hidden)
        operations = encoder.operations
        if encoder.embedding_norm is not None:
            hidden = operations.normalize(hidden, encoder.embedding_norm)
        self._residual = self._normed = hidden
        if encoder.first_norm is not None:
            self._normed = operations.normalize(hidden, encoder.first_norm)
        thetas = {layer.rope_theta for layer in encoder.config.layers if layer.rope_theta is not None}
        self._rotations = dict[float, Rotation]()
        if thetas:
            on_device = upload(places, device)
            self._rotations = {theta: _rotation(on_device, theta, encoder.config.head_dim) for theta in thetas}

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def is_done(self) -> bool:
        return self._next_layer == len(self._encoder.layers)

    def advance(self) -> None:
        """Runs the next layer."""
        weights, layer = self._encoder.layers[self._next_layer], self._encoder.config.layers[self._next_layer]
        self._add(self._attention(self._normed, weights, layer), weights.attention_norm, weights.after_attention)
        self._add(self._mlp(self._normed, weights), weights.mlp_norm, weights.after_mlp)
        self._next_layer += 1

    def pool(self, method: PoolingMethod) -> torch.Tensor:
        """The vector of each input, or the values of its labels: float32 [num_inputs, size]."""
        hidden, lengths = self._normed, np.array(self.lengths)
        if method is PoolingMethod.MEAN:
            on_device = upload(lengths, hidden.device)
            pooled = torch.segment_reduce(hidden.float(), "mean", lengths=on_device, axis=0, unsafe=True)
        else:
            ends = np.cumsum(lengths)
            rows = ends - 1 if method is PoolingMethod.LAST else ends - lengths
            pooled = hidden[upload(rows, hidden.device)].float()
        return self._through_head(pooled)

    def tokens(self, indexes: Sequence[int], head: TokenHead | None = None) -> torch.Tensor:
        """The vectors of all tokens of some inputs, one after another, or the values of labels: float32 [n, size].

        head: the layer that makes them; None: those that make the model's vector
        """
        ends = np.cumsum(self.lengths)
        rows = np.concatenate([np.arange(ends[index] - self.lengths[index], ends[index]) for index in indexes])
        hidden = self._normed if len(rows) == len(self._normed) else self._normed[upload(rows, self._normed.device)]
        if head is not None:
            return self._encoder.token_heads[head].forward(hidden.float())
        return self._through_head(hidden.float())

    def _through_head(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self._encoder.head:
            values = layer.forward(values)
        return values

    def _add(self, delta: torch.Tensor, norm: Norm, delta_norm: Norm | None) -> None:
        """Adds to the residual what half a layer has computed."""
        total, normed = self._encoder.operations.add_normalize(self._residual, delta, norm, delta_norm)
        self._residual = total if self._encoder.config.has_norms_before else normed
        self._normed = normed

    def _position_rows(self, token_ids: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The row of the table of positions for each token: int64 [n]."""
        offset, padding_id = self._encoder.config.position_offset or 0, self._encoder.config.padding_id
        if padding_id is None or not (token_ids == padding_id).any():
            return places + offset
        counts = (token_ids != padding_id).astype(np.int64)
        parts = np.split(counts, np.cumsum(self.lengths)[:-1])
        return np.concatenate([each.cumsum() * each + padding_id for each in parts])

    def _attention(self, x: torch.Tensor, weights: LayerWeights, layer: EncoderLayer) -> torch.Tensor:
        encoder, config = self._encoder, self._encoder.config
        num_heads, num_kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        rotation = None if layer.rope_theta is None else self._rotations[layer.rope_theta]
        qkv, num_rotated = weights.qkv.forward(x), num_heads + num_kv_heads
        qkv = encoder.operations.prepare_heads(qkv, num_rotated, weights.head_norms, rotation)
        q, k, v = qkv.unflatten(1, (-1, dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        attended = attend(
            q,
            k,
            v,
            self._sequences,
            scale=config.attention_scale,
            window=layer.window,
            distance_bias=encoder.distance_bias,
            positions=weights.positions,
        )
        return weights.o.forward(attended.flatten(1))

    def _mlp(self, x: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        activated = self._encoder.operations.activate(weights.up.forward(x), self._encoder.activation)
        return weights.down.forward(activated)


def _rotation(places: torch.Tensor, theta: float, head_dim: int) -> Rotation:
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=places.device).float() / head_dim)
    angles = places.float()[:, None] * frequencies
    return Rotation(angles.cos(), angles.sin())
