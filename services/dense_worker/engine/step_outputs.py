"""`StepOutputs`: what the sequences of a step got from it. Part of the scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from services.dense_worker.engine.sequence import SequenceOutput


class DecodedTokens(NamedTuple):
    """One token of each of these sequences, which go on and had tokens before."""

    streams: np.ndarray  # int64 [num_tokens], of the gateways
    seq_ids: np.ndarray  # uint64 [num_tokens]
    token_ids: np.ndarray  # int64 [num_tokens]
    sequences: np.ndarray  # object [num_tokens]


NO_DECODED = DecodedTokens(np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, object))


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Nearly all outputs of most steps are `decoded`; first tokens, ends and all that is special are `others`."""

    decoded: DecodedTokens = NO_DECODED
    others: SequenceOf[SequenceOutput] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that sequences got."""
        num_others = sum([len(output.token_ids) for output in self.others]) if self.others else 0
        return len(self.decoded.token_ids) + num_others

    def __len__(self) -> int:
        return len(self.decoded.token_ids) + len(self.others)

    def __iter__(self) -> Iterator[SequenceOutput]:
        """All outputs, one by one."""
        for sequence, token_id in zip(self.decoded.sequences, self.decoded.token_ids.tolist(), strict=True):
            yield SequenceOutput(sequence, (token_id,), None)
        yield from self.others
