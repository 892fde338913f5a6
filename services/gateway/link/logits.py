"""`LogitRows`: logits of consecutive tokens as they arrive from a dense worker. Used in the gateway's event loop."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_LOGIT = 4  # a 32-bit float
BYTES_PER_HIDDEN_VALUE = 56  # a value of a hidden state: twice as a 32-bit float and twice as JSON, at most 24 bytes


@dataclass(frozen=True, slots=True)
class Logits:
    """Some rows of logits: little-endian 32-bit floats, [num_rows, vocab_size]."""

    num_rows: int
    values: bytes


class LogitRows:
    """Rows from index 0 on. Rows that have been taken are forgotten."""

    def __init__(self) -> None:
        self._values = bytearray()
        self._row_bytes = 0  # unknown until the first rows arrive
        self._num_taken = 0

    @property
    def num_rows(self) -> int:
        """Number of rows that have arrived, those taken included."""
        return self._num_taken + (len(self._values) // self._row_bytes if self._row_bytes else 0)

    def set_rows(self, start: int, num_rows: int, values: bytes) -> None:
        """Stores rows from index `start` on. After a crash of a worker, rows may arrive again."""
        if start > self.num_rows:
            return  # rows before them are still to come again
        self._row_bytes = len(values) // num_rows
        num_old = max(0, self._num_taken - start)  # taken already
        if num_old < num_rows:
            begin = (start + num_old - self._num_taken) * self._row_bytes
            kept = memoryview(values)[num_old * self._row_bytes :]
            self._values[begin : begin + len(kept)] = kept

    def take(self, num_rows: int) -> Logits:
        """Takes the next rows, which must have arrived."""
        size = num_rows * self._row_bytes
        taken = bytes(memoryview(self._values)[:size])
        del self._values[:size]
        self._num_taken += num_rows
        return Logits(num_rows, taken)
