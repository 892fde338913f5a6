"""How some checkpoints store a tensor: transposed, without padding, with heads in another order, or experts in one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.dense_worker.parameters import WHOLE, Axes


@dataclass(frozen=True, slots=True)
class Transposed:
    """A StoredLayout of weights [in_features, out_features] (the Conv1D layers of GPT-2); biases are as here."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The reversed shape."""
        return shape[::-1]

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """A view of the tensor with its dimensions swapped."""
        return stored.t() if stored.dim() == 2 else stored

    def axes(self, num_dims: int) -> Axes:
        """Dimensions swapped."""
        return Axes(1, 0) if num_dims == 2 else Axes(0)


@dataclass(frozen=True, slots=True)
class Padded:
    """A StoredLayout of weights, and of their biases, that have zeros here behind the stored rows and columns."""

    num_rows: int = 0  # so many more than in the checkpoint
    num_columns: int = 0

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Without the zeros."""
        return (shape[0] - self.num_rows, *(size - self.num_columns for size in shape[1:]))

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """A copy with the zeros."""
        columns = (0, self.num_columns) if stored.dim() == 2 else ()
        return torch.nn.functional.pad(stored, (*columns, 0, self.num_rows))

    def axes(self, num_dims: int) -> Axes:
        """Parts may lie within the zeros, and are not read alone."""
        return WHOLE


@dataclass(frozen=True, slots=True)
class LessOne:
    """A StoredLayout of the weights of norms that are stored as their difference to 1 (Nemotron)."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The same shape."""
        return shape

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """The weights, in float32."""
        return stored.float() + 1.0

    def axes(self, num_dims: int) -> Axes:
        """As here."""
        return Axes(0, 1)


@dataclass(frozen=True, slots=True)
class UnitRows:
    """A StoredLayout of rows that are divided by their lengths (the head of Baichuan 2)."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The same shape."""
        return shape

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """The rows, in float32."""
        return torch.nn.functional.normalize(stored.float())

    def axes(self, num_dims: int) -> Axes:
        """Whole rows: their lengths depend on all columns."""
        return Axes(0)


@dataclass(frozen=True, slots=True)
class GroupedHeads:
    """A StoredLayout of a fused projection: for each kv head its q heads, then its k head, then its v head.

    Here all q heads come first, then all k heads, then all v heads.
    """

    num_kv_heads: int
    head_dim: int

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The same shape."""
        return shape

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """A copy with reordered rows."""
        groups = stored.view(self.num_kv_heads, -1, self.head_dim, *stored.shape[1:])
        q, k, v = groups.split([groups.shape[1] - 2, 1, 1], dim=1)
        return torch.cat([part.reshape(-1, *stored.shape[1:]) for part in (q, k, v)])

    def axes(self, num_dims: int) -> Axes:
        """Rows of one part are not together, and not read alone."""
        return WHOLE


@dataclass(frozen=True, slots=True)
class PartsByHead:
    """A StoredLayout of several parts in one tensor, in which all parts of a head follow one another.

    Here the rows are those of some of the parts: of the first one for all heads, then of the next one.
    """

    num_heads: int
    sizes: tuple[int, ...]  # rows of each part in a head, in the order of the file
    taken: tuple[int, ...]  # numbers of the parts that are here, in their order

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape with the rows of all parts."""
        return (self.num_heads * sum(self.sizes), *shape[1:])

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """A copy of the rows."""
        parts = stored.unflatten(0, (self.num_heads, sum(self.sizes))).split(self.sizes, dim=1)
        return torch.cat([parts[number].flatten(0, 1) for number in self.taken])

    def axes(self, num_dims: int) -> Axes:
        """Rows of one part are not together, and not read alone."""
        return WHOLE


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """A StoredLayout of one layer of all experts: [num_experts, rows of an expert, ...]; biases [num_experts, rows].

    Here the rows of all experts follow one another, and in each expert the rows of `gate` come before those of `up`.
    """

    num_experts: int
    is_interleaved: bool  # the rows of gate and up take turns
    is_transposed: bool  # weights are [num_experts, in_features, rows of an expert]; quantized ones never are

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape with a dimension for the experts."""
        rows, *others = shape
        own = (rows // self.num_experts, *others)
        return (self.num_experts, *(own[::-1] if self.is_transposed else own))

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """A tensor of rows."""
        rows = stored.transpose(1, 2) if self.is_transposed and stored.dim() == 3 else stored
        if self.is_interleaved:
            rows = rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return rows.flatten(0, 1)

    def axes(self, num_dims: int) -> Axes:
        """Equal parts of all experts are read alone; interleaved, of gate and up of all experts."""
        weights = (2, 1) if self.is_transposed else (1, 2)
        rows, columns = weights if num_dims == 2 else (1, None)
        return Axes(rows, columns, self.num_experts * (2 if self.is_interleaved else 1))
