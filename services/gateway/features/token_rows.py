"""`RowRecord`: rows of consecutive tokens as they arrive from a dense worker. `TokenRows`: some of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.gateway.features.report import ReportRecord

BYTES_PER_VALUE = 4  # a 32-bit float


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Little-endian 32-bit floats, [num_rows, values of a token]."""

    num_rows: int
    values: bytes

    @property
    def num_values(self) -> int:
        return len(self.values) // BYTES_PER_VALUE

    def array(self) -> np.ndarray:
        """float32 [num_rows, n]."""
        return np.frombuffer(self.values, "<f4").reshape(self.num_rows, -1)


class RowRecord(ReportRecord):
    """Rows from index 0 on. Rows that have been taken are forgotten."""

    def __init__(self) -> None:
        self._values = bytearray()
        self._row_bytes = 0  # unknown until the first rows arrive
        self._num_taken = 0

    @property
    def num_reported(self) -> int:
        return self._num_taken + (len(self._values) // self._row_bytes if self._row_bytes else 0)

    def keep(self, start: int, num_tokens: int, values: bytes) -> bool:
        if start > self.num_reported:
            return False  # rows before them are still to come again
        self._row_bytes = len(values) // num_tokens
        num_old = max(0, self._num_taken - start)  # taken already
        if num_old < num_tokens:
            begin = (start + num_old - self._num_taken) * self._row_bytes
            kept = memoryview(values)[num_old * self._row_bytes :]
            self._values[begin : begin + len(kept)] = kept
        return False

    def take_rows(self, num_rows: int) -> TokenRows:
        """Takes the next rows, which must have arrived."""
        size = num_rows * self._row_bytes
        taken = bytes(memoryview(self._values)[:size])
        del self._values[:size]
        self._num_taken += num_rows
        return TokenRows(num_rows, taken)
