"""`SlotTable`: a table on the device with values of different lengths for the slots of the sampler."""

from __future__ import annotations

import numpy as np
import torch

from services.dense_worker.sampling.upload import upload


class SlotTable:
    """One padded tensor that grows to the largest values ever set, rounded up to powers of two.

    values: torch.Tensor [num_slots, ...]; replaced when it grows, so read it again at each step
    """

    def __init__(self, num_slots: int, num_dims: int, dtype: torch.dtype, padding: float, device: torch.device) -> None:
        """`num_dims`: dimensions of one slot's values. No memory is allocated before the first `set`."""
        self._padding = padding
        self.values = torch.full((num_slots, *[0] * num_dims), padding, dtype=dtype, device=device)

    def set(self, slot: int, values: np.ndarray) -> None:
        """Replaces the values of `slot`; `values` has the table's dtype."""
        shape = self.values.shape[1:]
        needed = tuple(max(old, _round_up(new)) for old, new in zip(shape, values.shape, strict=True))
        if needed != shape:
            grown = self.values.new_full((len(self.values), *needed), self._padding)
            grown[:, *map(slice, shape)] = self.values
            self.values = grown
        padded = np.full(needed, self._padding, dtype=values.dtype)
        padded[tuple(map(slice, values.shape))] = values
        self.values[slot].copy_(upload(padded, self.values.device))


def _round_up(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0
