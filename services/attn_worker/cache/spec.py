"""`KVCacheSpec`: the contents and size of the paged KV cache, which the backends allocate by layer and block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from services.common.errors import CapacityError
from services.common.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Sizes, element type and windows of a model's keys and values.

    A backend supports every field, or refuses it by a ConfigError that names the value. The cache has no scales:
    keys and values are stored as they are. A format that needs scales adds them here, as one more field, and to
    `token_bytes`.
    """

    num_blocks: int  # for sequences; one more block with this index, the null block, serves rows without a sequence
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of stored elements; the model may compute in another dtype
    windows: tuple[int | None, ...]  # per layer; token i sees token j iff 0 <= i - j < window; None: iff 0 <= i - j

    @classmethod
    def of_model(cls, config: ModelConfig, dtype: torch.dtype, num_blocks: int, block_size: int) -> KVCacheSpec:
        """The spec with the heads and windows of a model."""
        return cls(num_blocks, block_size, config.num_kv_heads, config.head_dim, dtype, config.sliding_windows)

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def kv_size(self) -> int:
        """Number of elements of a token's keys in one layer, all heads together; the values have as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.num_layers * self.kv_size * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.block_size * self.token_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks without the null block."""
        return self.num_blocks * self.block_bytes

    @property
    def token_major_shape(self) -> tuple[int, ...]:
        """A shape in which each token of a block has its k heads and then its v heads."""
        return (self.num_layers, self.num_blocks + 1, self.block_size, 2 * self.num_kv_heads, self.head_dim)

    @property
    def head_major_shape(self) -> tuple[int, ...]:
        """A shape in which each head of a block has the keys and then the values of all its tokens."""
        return (self.num_layers, self.num_blocks + 1, self.num_kv_heads, 2, self.block_size, self.head_dim)

    def allocate(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Zeros of one of the two shapes: even masked elements must be finite. Raises CapacityError."""
        try:
            return torch.zeros(shape, dtype=self.dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, plain RuntimeError from the CPU allocator
            num_bytes = math.prod(shape) * self.dtype.itemsize
            raise CapacityError(
                f"{self.num_blocks + 1} KV blocks need {num_bytes} bytes on {device}: {error}"
            ) from error
