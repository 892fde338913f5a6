"""`EmbedRows`: finds the rows of a step that stand for vectors of a prompt. Engine thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.dense_worker.backends import InputEmbeds
from services.dense_worker.features.prompt_embeds.loaded_embeds import LoadedEmbeds

_ANY_TOKEN = 0  # a valid id for rows whose embeddings are replaced


class EmbedRows:
    """Takes the tokens of one sequence after the other."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._vectors: list[torch.Tensor] = []

    def take(self, embeds: LoadedEmbeds, token_ids: Sequence[int], first_row: int) -> list[int]:
        """The tokens, which have rows from `first_row`, with any valid id in place of those that stand for vectors."""
        places = [place for place, token_id in enumerate(token_ids) if token_id >= embeds.first_token_id]
        if not places:
            return list(token_ids)
        self._rows += [first_row + place for place in places]
        self._vectors.append(embeds.rows[[token_ids[place] - embeds.first_token_id for place in places]])
        return [token_id if token_id < embeds.first_token_id else _ANY_TOKEN for token_id in token_ids]

    def gather(self) -> InputEmbeds | None:
        """All rows that have vectors; None if there are none."""
        if not self._rows:
            return None
        return InputEmbeds(torch.tensor(self._rows, dtype=torch.int64), torch.cat(self._vectors))
