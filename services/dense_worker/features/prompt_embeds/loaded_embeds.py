"""`LoadedEmbeds`: vectors that stand in a prompt in place of the embeddings of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoadedEmbeds:
    """Token id `first_token_id + i` of a prompt stands for row i. Sequences with equal tables share one object."""

    hash: str  # of the rows as the client gave them, hexadecimal
    first_token_id: int  # the number of token ids of the vocabulary
    rows: torch.Tensor  # [num_rows, hidden] in the model's dtype, in the host's memory: steps copy what they need

    def without_rows(self, token_ids: Sequence[int]) -> list[int]:
        """Those of `token_ids` that are of the vocabulary."""
        return [token_id for token_id in token_ids if token_id < self.first_token_id]
