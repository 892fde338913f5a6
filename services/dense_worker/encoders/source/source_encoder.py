"""`SourceEncoder`: computes what the cross attention of a decoder reads, from tokens, sound or pictures."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from services.common.attention.relative_bias import two_sided_buckets
from services.common.families.shape import RelativeBias
from services.dense_worker.encoders.packed_attention import PackedSequences, attend
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.layer import DecoderLayer
from services.dense_worker.model.operations import Operations, Residual
from services.dense_worker.parameters import Parameter, parameters
from services.dense_worker.sampling.upload import upload


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of tokens: a row of the table for each, times a number, plus a row for its position, normalised."""

    table: Parameter  # [vocab_size, hidden]
    multiplier: float
    positions: Parameter | None  # [num_positions + offset, hidden]
    position_offset: int  # the row of position 0
    norm: Norm | None

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """inputs: int64 [length] each -> [sum of the lengths, hidden]"""
        hidden = F.embedding(torch.cat(list(inputs)), self.table.data) * self.multiplier
        if self.positions is not None:
            rows = torch.cat([torch.arange(len(each), device=hidden.device) for each in inputs])
            hidden = hidden + F.embedding(rows + self.position_offset, self.positions.data)
        return hidden if self.norm is None else self.norm.normalize(hidden)

    def num_rows(self, source: torch.Tensor) -> int:
        """The rows of an input."""
        return len(source)


@dataclass(frozen=True, slots=True)
class SoundRows:
    """Rows of sound: two convolutions over its log-mel features, the second of which halves their number (Whisper)."""

    first: Parameter  # [hidden, num_mel_bins, 3]
    first_bias: Parameter
    second: Parameter  # [hidden, hidden, 3]
    second_bias: Parameter
    positions: Parameter  # [num_positions, hidden]

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """inputs: [num_mel_bins, 2 * num_positions] each, in the model's dtype -> [inputs * num_positions, hidden]"""
        x = F.gelu(F.conv1d(torch.stack(list(inputs)), self.first.data, self.first_bias.data, padding=1))
        x = F.gelu(F.conv1d(x, self.second.data, self.second_bias.data, stride=2, padding=1))
        # Made contiguous, also of one input: every later sum would have the order of its residual in memory.
        return (x.transpose(1, 2) + self.positions.data).contiguous().flatten(0, 1)

    def num_rows(self, source: torch.Tensor) -> int:
        """The rows of an input."""
        return len(self.positions.data)


@dataclass(frozen=True, slots=True)
class EncoderAttention:
    """The attention of all layers: every token of an input sees all of them."""

    num_heads: int
    head_dim: int
    scale: float | None
    relative_bias: RelativeBias | None
    biases: Parameter | None  # [num_buckets, num_heads], of the relative bias

    def distance_bias(self, max_length: int) -> torch.Tensor | None:
        """What is added to scores by distance, [num_heads, 2 * max_length - 1]; None: nothing."""
        if self.relative_bias is None or self.biases is None:
            return None
        buckets = two_sided_buckets(self.relative_bias, max_length)
        return self.biases.data[upload(buckets.numpy(), self.biases.data.device)].T

    def forward(
        self, qkv: torch.Tensor, sequences: PackedSequences, distance_bias: torch.Tensor | None
    ) -> torch.Tensor:
        """qkv [n, 3 * num_heads * head_dim] -> [n, num_heads * head_dim]."""
        q, k, v = qkv.unflatten(1, (3, self.num_heads, self.head_dim)).unbind(1)
        return attend(q, k, v, sequences, scale=self.scale, distance_bias=distance_bias).flatten(1)


class Body(Protocol):
    """What an encoder is made of: a frozen dataclass."""

    def num_rows(self, source: torch.Tensor) -> int:
        """The rows of an input."""

    def num_inner_rows(self, source: torch.Tensor) -> int:
        """The most rows that a layer computes of an input."""

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters by their names within it."""

    def parts(
        self, operations: Operations, inputs: Sequence[torch.Tensor], max_products: int
    ) -> Generator[None, None, torch.Tensor]:
        """The encoder's output for all inputs, one after the other: [n, hidden].

        Yields after each layer; a layer of windows (Swin) also after about so many products of two numbers.
        """


@dataclass(frozen=True, slots=True)
class SequenceEncoder:
    """A `Body` for tokens or sound: layers in which all rows of an input see each other."""

    rows: TokenRows | SoundRows
    attention: EncoderAttention
    layers: tuple[DecoderLayer, ...]
    norm: Norm | None

    def num_rows(self, source: torch.Tensor) -> int:
        """The rows of an input."""
        return self.rows.num_rows(source)

    def num_inner_rows(self, source: torch.Tensor) -> int:
        """The same."""
        return self.num_rows(source)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters, such as ("layers.0.qkv_weight", ...)."""
        for parameter in (*parameters(self.rows), *parameters(self.attention), *parameters(self.norm)):
            yield parameter.name, parameter
        for index, part in enumerate(self.layers):
            for parameter in parameters(part):
                yield f"layers.{index}.{parameter.name}", parameter

    def parts(
        self, operations: Operations, inputs: Sequence[torch.Tensor], max_products: int
    ) -> Generator[None, None, torch.Tensor]:
        """inputs: what `rows` takes."""
        lengths = [self.num_rows(each) for each in inputs]
        return (yield from self.encode(operations, self.rows.forward(inputs), lengths))

    def encode(
        self, operations: Operations, rows: torch.Tensor, lengths: Sequence[int]
    ) -> Generator[None, None, torch.Tensor]:
        """The output for rows of inputs of these lengths, [n, hidden] -> [n, hidden]; yields after each layer."""
        sequences = PackedSequences(lengths, rows.device)
        bias = self.attention.distance_bias(sequences.max_length)
        residual = Residual(rows)
        for layer in self.layers:
            qkv, residual = layer.before.forward(operations, residual, None)
            residual = layer.after.forward(operations, self.attention.forward(qkv, sequences, bias), residual)
            yield
        return operations.normalize(residual, self.norm)[1]


@dataclass(frozen=True, slots=True)
class SourceEncoder:
    """The encoder, and for each layer with cross attention the projection of its output to keys and values."""

    body: Body
    cross_kv: tuple[Linear, ...]  # by decoder layer with cross attention: [hidden -> 2 * kv_size], k rows, then v rows

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters, such as ("encoder.layers.0.qkv_weight", ...)."""
        for name, parameter in self.body.named_parameters():
            yield f"encoder.{name}", parameter
        for index, part in enumerate(self.cross_kv):
            for parameter in parameters(part):
                yield f"encoder.cross.{index}.{parameter.name}", parameter

    def keys_and_values(self, operations: Operations, output: torch.Tensor) -> Iterator[torch.Tensor]:
        """For each layer with cross attention, in order: k heads, then v heads of the output's rows, [n, 2 * kv_size].
        """
        for projection in self.cross_kv:
            yield operations.linear(projection, output)
