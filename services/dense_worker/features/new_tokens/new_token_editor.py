"""`SequenceNewTokens` knows the tokens of an output; `NewTokenEditor` takes them away where a new one is due."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.sampling.logits_editor import EditedRows, EditedSequence
from services.dense_worker.sampling.upload import upload

# Taken off the logits of tokens that the output has: one of them is sampled only if there is no other.
DISTANCE = 1e4


class SequenceNewTokens(SequenceFeature):
    """Follows the output as soon as the host knows its tokens."""

    allows_drafts = False  # it would have to go back to the tokens before a wrong one

    def __init__(self, every: int, num_prompt_tokens: int, output_token_ids: Iterable[int] = ()) -> None:
        """every: output token `every - 1` is new to the output, and so is each `every` tokens later; at least 1"""
        self.every = every
        self.num_prompt_tokens = num_prompt_tokens
        self.output_token_ids = set(output_token_ids)

    def restore(self, output_token_ids: SequenceOf[int]) -> None:
        """The output has these tokens and no others."""
        self.output_token_ids = set(output_token_ids)

    def fork(self) -> SequenceNewTokens:
        """Goes on with the same tokens."""
        return SequenceNewTokens(self.every, self.num_prompt_tokens, self.output_token_ids)


class NewTokenEditor:
    """What sequences have of the feature by slot, on the host. An editor of logits."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._sequences: list[SequenceNewTokens | None] = [None] * num_slots

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        """Stores what the sequence has of the feature."""
        found = next((each for each in sequence.features if isinstance(each, SequenceNewTokens)), None)
        self._sequences[slot] = found
        return found is not None

    def apply(self, logits: torch.Tensor, rows: EditedRows) -> None:
        """Takes `DISTANCE` off the tokens of those outputs whose next one has to be new."""
        pairs = list[tuple[int, int]]()
        columns = (rows.rows.tolist(), rows.slots.tolist(), rows.output_lens.tolist())
        for row, slot, output_len in zip(*columns, strict=True):
            sequence = self._sequences[slot]
            assert sequence is not None, "rows have what their slots were set with"
            if not (output_len + 1) % sequence.every:
                pairs += [(row, token_id) for token_id in sequence.output_token_ids]
        if pairs:
            index = upload(np.array(pairs, dtype=np.int64).T.copy(), self._device)
            logits[index[0], index[1]] -= DISTANCE

    def append(self, rows: EditedRows, token_ids: torch.Tensor) -> None:
        """Does nothing: `NewTokensFeature` gets the tokens when the host knows them."""
