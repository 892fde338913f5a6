"""`TokenReport`: what a feature reports to a client about tokens of its sequence, besides the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from services.pb import dense_pb2

MAX_PART_BYTES = 4 * 2**20  # of the rows in one message, which must fit into peers.max_message_bytes


@dataclass(frozen=True, slots=True, eq=False)
class TokenReport:
    """A row for each of consecutive tokens of a sequence. The gateway's part of the feature reads the rows.

    Made on the engine thread by `StepPart.read`, and sent on the event loop before the step's tokens.
    """

    seq_id: int
    feature: str  # its name
    start: int  # index of the first row's token: in the sequence or among its output tokens, as the feature defines
    rows: np.ndarray  # [num_tokens, values of a token]; [num_tokens, 0]: only that they are computed is reported

    @property
    def end(self) -> int:
        """Index after the last row's token."""
        return self.start + len(self.rows)

    def encode(self) -> Iterator[tuple[dense_pb2.StepOutput, int]]:
        """Messages, and about how many bytes each has: at most `MAX_PART_BYTES`, or one row."""
        size = max(1, MAX_PART_BYTES // max(1, self.rows[0].nbytes))
        for first in range(0, len(self.rows), size):
            rows = self.rows[first : first + size]
            output = dense_pb2.StepOutput()
            output.reports.add(
                seq_id=self.seq_id,
                feature=self.feature,
                start=self.start + first,
                num_tokens=len(rows),
                values=rows.tobytes(),
            )
            yield output, rows.nbytes
