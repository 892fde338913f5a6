"""`KVScales`: the scales of an FP8 KV cache. The dense worker reads them, the attention worker uses them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVScales:
    """One scale for the keys and one for the values of each layer: a stored element times its scale is the value.

    All are finite, above 0 and exact in float32.
    """

    keys: tuple[float, ...]  # by layer
    values: tuple[float, ...]

    @classmethod
    def ones(cls, num_layers: int) -> KVScales:
        """The scales of a model whose checkpoint has none."""
        return cls((1.0,) * num_layers, (1.0,) * num_layers)

    def of_layers(self, layers: Sequence[int]) -> KVScales:
        """Those of some layers alone."""
        return KVScales(*(tuple(each[layer] for layer in layers) for each in (self.keys, self.values)))

    @property
    def identity(self) -> bytes:
        """All scales as little-endian float32: keys and values that were stored with other scales are of no use."""
        return struct.pack(f"<{len(self.keys) + len(self.values)}f", *self.keys, *self.values)
