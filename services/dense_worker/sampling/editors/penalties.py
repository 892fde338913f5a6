"""`Penalties`: makes tokens that occurred before less (or more) likely. An editor of logits."""

from __future__ import annotations

import numpy as np
import torch

from services.dense_worker.sampling.logits_editor import EditedRows, EditedSequence, LogitsEditor
from services.dense_worker.sampling.upload import upload


class Penalties(LogitsEditor):
    """Strengths by slot, on the host, and counts of tokens by slot, on the device once any sequence needs them.

    _output_counts: int32 [num_slots, vocab_size]
    _is_in_prompt: bool [num_slots, vocab_size]
    """

    options = ("repetition_penalty", "frequency_penalty", "presence_penalty")

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._strengths = np.zeros((3, num_slots), dtype=np.float32)  # repetition, frequency, presence
        self._output_counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._is_in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._device = device

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        """Stores the three penalties and counts the tokens that the sequence already has."""
        params = sequence.params
        self._strengths[:, slot] = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if not len(self._output_counts):
            shape = (self._strengths.shape[1], self._output_counts.shape[1])
            self._output_counts = self._output_counts.new_zeros(shape)
            self._is_in_prompt = self._is_in_prompt.new_zeros(shape)
        prompt = upload(np.asarray(sequence.prompt_token_ids, dtype=np.int64), self._device)
        output = upload(np.asarray(sequence.output_token_ids, dtype=np.int64), self._device)
        self._is_in_prompt[slot].zero_().index_fill_(0, prompt, True)
        ones = torch.ones(len(output), dtype=torch.int32, device=self._device)
        self._output_counts[slot].zero_().index_add_(0, output, ones)
        return True

    def apply(self, logits: torch.Tensor, rows: EditedRows) -> None:
        """Penalises tokens that occurred before.

        Repetition: Keskar et al., "CTRL", 2019, section 4.1, over prompt and output; negative logits are
        multiplied. Then, over the output: logit - frequency * count - presence * (count > 0).
        """
        device_rows, slots = rows.on_device
        repetition, frequency, presence = upload(self._strengths[:, rows.slots], self._device)[..., None]
        counts = self._output_counts[slots]
        is_output = counts > 0
        is_seen = is_output | self._is_in_prompt[slots]
        penalized = logits[device_rows]
        repeated = torch.where(penalized > 0, penalized / repetition, penalized * repetition)
        penalized = torch.where(is_seen, repeated, penalized)
        logits[device_rows] = penalized - frequency * counts - presence * is_output

    def append(self, rows: EditedRows, token_ids: torch.Tensor) -> None:
        """Counts the new tokens."""
        device_rows, slots = rows.on_device
        self._output_counts[slots, token_ids[device_rows]] += 1
