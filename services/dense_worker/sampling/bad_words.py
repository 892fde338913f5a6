"""`BadWords`: sequences of tokens that must not appear in an output. An editor of logits.

A word of k tokens forbids its last token where the k - 1 before it are the newest tokens of the output; a word
of one token is always forbidden. Only the output counts: a word that the prompt began may be ended (as in
vLLM; Hugging Face looks at the prompt, too). The newest tokens are kept on the device, since the host does not
know that of a step which still runs when the next one is enqueued.
"""

from __future__ import annotations

import numpy as np
import torch

from services.common.sampling_params import MAX_BAD_WORD_TOKENS
from services.dense_worker.sampling.logits_editor import EditedRows, EditedSequence
from services.dense_worker.sampling.slot_table import SlotTable
from services.dense_worker.sampling.upload import upload

_NONE = -1  # no token: matches any where a word is shorter than the table, and none where the output is
_MAX_TAIL = MAX_BAD_WORD_TOKENS - 1


class BadWords:
    """Words, and the tail of the output that they are compared with, by slot; both newest token first."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._words = SlotTable(num_slots, 2, torch.int32, _NONE, device)
        self._tails = torch.full((num_slots, _MAX_TAIL), _NONE, dtype=torch.int32, device=device)

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        """Takes `bad_words` and the newest tokens of the output."""
        words = sequence.params.bad_words
        if not words:
            return False
        table = np.full((len(words), max(map(len, words))), _NONE, dtype=np.int32)
        for row, word in zip(table, words, strict=True):
            row[: len(word)] = word[::-1]
        self._words.set(slot, table)
        newest = sequence.output_token_ids[-_MAX_TAIL:]
        tail = np.full(_MAX_TAIL, _NONE, dtype=np.int32)
        tail[: len(newest)] = newest[::-1]
        self._tails[slot].copy_(upload(tail, self._tails.device))
        return True

    def apply(self, logits: torch.Tensor, rows: EditedRows) -> None:
        """Sets the forbidden tokens to -inf."""
        device_rows, slots = rows.on_device
        words = self._words.values[slots]  # [n, num_words, num_tokens]
        last, before = words[..., 0], words[..., 1:]
        tails = self._tails[slots, : before.shape[2]]
        is_forbidden = ((before == tails[:, None]) | (before == _NONE)).all(-1) & (last != _NONE)
        # The smaller of logit and bound: no list of the forbidden tokens, whose length the host would wait for.
        bounds = torch.where(is_forbidden, -torch.inf, torch.inf)
        index = device_rows[:, None] * logits.shape[1] + last.clamp(min=0)
        logits.view(-1).scatter_reduce_(0, index.view(-1), bounds.view(-1), "amin")

    def append(self, rows: EditedRows, token_ids: torch.Tensor) -> None:
        """Puts the new tokens before the others of their tails."""
        device_rows, slots = rows.on_device
        newest = token_ids[device_rows, None].int()
        self._tails[slots] = torch.cat([newest, self._tails[slots, :-1]], dim=1)
