"""`LogitsEditor`: what changes a step's logits before tokens are chosen. The sampler holds a list of them.

An editor owns its options and its state for every slot, and runs on the engine thread. `editors.py` has the list
and the order. The sampler knows which slots need which editor and calls no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from services.common.sampling_params import SamplingParams
from services.dense_worker.sampling.upload import upload


@dataclass(frozen=True, slots=True)
class EditedSequence:
    """What an editor may know of a sequence that is given a slot, new or resumed. Token ids are valid."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # those that it has already
    stop_token_ids: Sequence[int]  # EOS ids among them; configurations name some beyond the vocabulary


@dataclass(frozen=True)
class EditedRows:
    """The rows of one step that one editor is for, n of them, on the host and on the device.

    The slots are all different, except that a sequence with drafts has several rows in turn: each is for the token
    after the drafts before it. `room_for_drafts` gives no drafts to sequences whose editors depend on `append`.
    """

    rows: np.ndarray  # int64 [n]: indices into the step's logits, rising
    slots: np.ndarray  # int64 [n]
    output_lens: np.ndarray  # integers [n]: output tokens before the one that the row is for
    device: torch.device

    @cached_property
    def on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and slots, int64 [n] each; uploaded together, when first asked for."""
        rows, slots = upload(np.stack([self.rows, self.slots]), self.device)
        return rows, slots


class LogitsEditor(Protocol):
    """No method waits for the device. Memory on the device is taken when a sequence first needs the editor."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None: ...

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        """Whether the sequence needs this editor; if so, its options and past replace what `slot` had."""

    def apply(self, logits: torch.Tensor, rows: EditedRows) -> None:
        """Changes `rows` of logits (float32 [r, vocab_size], contiguous), in place, and no other row."""

    def append(self, rows: EditedRows, token_ids: torch.Tensor) -> None:
        """Notes what the step's rows got: int64 [r] on the device, of which the host knows nothing yet."""
