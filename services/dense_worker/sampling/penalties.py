"""`Penalties`: tokens that occurred become less likely, or more. State of the sampler, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.dense_worker.sampling.upload import upload


class Penalties:
    """Counts of tokens by slot, int32 and bool [num_slots, vocab_size]; large, so they come with the first use."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        shape = (num_slots, vocab_size)
        self._output_counts = torch.zeros(shape, dtype=torch.int32, device=device)
        self._prompt_mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self._device = device

    def set(self, slot: int, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        """Counts the tokens that the slot's sequence has already."""
        prompt = upload(np.asarray(prompt_token_ids, dtype=np.int64), self._device)
        output = upload(np.asarray(output_token_ids, dtype=np.int64), self._device)
        self._prompt_mask[slot].zero_().index_fill_(0, prompt, True)
        ones = torch.ones(len(output), dtype=torch.int32, device=self._device)
        self._output_counts[slot].zero_().index_add_(0, output, ones)

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, options: np.ndarray) -> None:
        """Penalises `rows` (int64 [n]) of logits [r, vocab_size], in place; `options` [n] are the sampler's.

        Repetition: Keskar et al., "CTRL", 2019, section 4.1, over prompt and output; negative logits are
        multiplied. Then, over the output: logit - frequency * count - presence * (count > 0).
        """
        packed = np.stack([options[f"{name}_penalty"] for name in ("repetition", "frequency", "presence")])
        repetition, frequency, presence = upload(packed, self._device)[..., None]
        counts = self._output_counts[slots]
        is_output = counts > 0
        is_seen = is_output | self._prompt_mask[slots]
        penalized = logits[rows]
        repeated = torch.where(penalized > 0, penalized / repetition, penalized * repetition)
        penalized = torch.where(is_seen, repeated, penalized)
        logits[rows] = penalized - frequency * counts - presence * is_output

    def append(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Counts the tokens (int64 [n]) that `slots` (int64 [n], all different) got."""
        self._output_counts[slots, token_ids] += 1
