"""`GivenRows`: the rows of a step whose vectors are given, in place of embeddings of tokens.

`GivenRowsOfStep` finds them on the engine thread.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from services.dense_worker.features.prompt_embeds.loaded_table import LoadedTable

_ANY_TOKEN = 0  # a valid id for rows whose embeddings are replaced


class GivenRows(NamedTuple):
    """g rows of a step and their vectors, in the model's dtype."""

    rows: torch.Tensor  # int64 [g], all different
    vectors: torch.Tensor  # [g, hidden]

    def upload(self, device: torch.device) -> GivenRows:
        """The same on a GPU. Enqueues copies from the host."""
        # torch keeps pinned memory until the copy is done.
        return GivenRows(*(each.pin_memory().to(device, non_blocking=True) for each in self))


class GivenRowsOfStep:
    """Takes the tokens of one sequence after the other; most steps have no sequence with a table."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._vectors: list[torch.Tensor] = []

    def take(self, table: LoadedTable, token_ids: list[int], first_row: int) -> list[int]:
        """The tokens, which have rows from `first_row`, with any valid id in place of those of the table."""
        places = [place for place, token_id in enumerate(token_ids) if token_id >= table.first_token_id]
        if not places:
            return token_ids
        self._rows += [first_row + place for place in places]
        self._vectors.append(table.rows[[token_ids[place] - table.first_token_id for place in places]])
        return [token_id if token_id < table.first_token_id else _ANY_TOKEN for token_id in token_ids]

    def gather(self) -> GivenRows | None:
        """All rows of the step that have vectors; None if there are none."""
        if not self._rows:
            return None
        return GivenRows(torch.tensor(self._rows, dtype=torch.int64), torch.cat(self._vectors))
