"""`BadWords`: sequences of tokens that must not appear in an output. An editor of logits.

A word of k tokens forbids its last token if its first k - 1 tokens are the newest tokens of the output; a word of one
token is always forbidden. Only the output counts: a word that begins in the prompt may be completed (as in vLLM;
Hugging Face also checks the prompt). The newest tokens are kept on the device, because the host does not know the token
of a running step when the next step is enqueued.
"""

from __future__ import annotations

import numpy as np
import torch

from services.common.sampling_params import MAX_BAD_WORD_TOKENS
from services.dense_worker.sampling.logits_editor import EditedRows, EditedSequence, LogitsEditor
from services.dense_worker.sampling.slot_table import SlotTable
from services.dense_worker.sampling.upload import upload

_NONE = -1  # padding: in a short word it matches any token, in a short output it matches none
_MAX_TAIL = MAX_BAD_WORD_TOKENS - 1


class BadWords(LogitsEditor):
    """Words and the end of the output, which is compared with them, by slot; both with the newest token first."""

    options = ("bad_words",)

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._words = SlotTable(num_slots, 2, torch.int32, _NONE, device)
        self._tails = torch.full((num_slots, _MAX_TAIL), _NONE, dtype=torch.int32, device=device)

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        """Stores `bad_words` and the newest tokens of the output."""
        words = sequence.params.bad_words
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
        # Takes the minimum of logit and bound: the host would have to wait for the length of a list of tokens.
        bounds = torch.where(is_forbidden, -torch.inf, torch.inf)
        index = device_rows[:, None] * logits.shape[1] + last.clamp(min=0)
        logits.view(-1).scatter_reduce_(0, index.view(-1), bounds.view(-1), "amin")

    def append(self, rows: EditedRows, token_ids: torch.Tensor) -> None:
        """Puts the new tokens in front of the outputs' ends."""
        device_rows, slots = rows.on_device
        newest = token_ids[device_rows, None].int()
        self._tails[slots] = torch.cat([newest, self._tails[slots, :-1]], dim=1)
