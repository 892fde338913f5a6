"""`LogitsEditor`: the base of editors, which change a step's logits before sampling. The sampler has several.

An editor owns its options and state for every slot and runs on the engine thread. Those of `editors/` are in every
sampler, and features add theirs after them. The sampler knows which slots need which editor and calls only those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from services.common.sampling_params import SamplingParams
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.sampling.upload import upload


@dataclass(frozen=True, slots=True)
class EditedSequence:
    """The data for editors about a new or resumed sequence that gets a slot. Token ids are valid."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # tokens that the sequence already has
    stop_token_ids: Sequence[int]  # including EOS; configurations may name ids beyond the vocabulary
    features: Sequence[SequenceFeature] = ()  # what it has that only some sequences have


@dataclass(frozen=True)
class EditedRows:
    """The n rows of one step that an editor changes, on the host and on the device.

    All slots are different, except that a sequence with drafts has several consecutive rows, each for the token after
    the drafts before it. `may_have_drafts` gives none to sequences whose editors depend on `append`.
    """

    rows: np.ndarray  # int64 [n]: indices into the step's logits, rising
    slots: np.ndarray  # int64 [n]
    output_lens: np.ndarray  # integers [n]: number of output tokens before the token of the row
    device: torch.device

    @cached_property
    def on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and slots, int64 [n] each; uploaded together on the first call."""
        rows, slots = upload(np.stack([self.rows, self.slots]), self.device)
        return rows, slots


class LogitsEditor:
    """No method waits for the device. Device memory is allocated when a sequence first needs the editor."""

    options: ClassVar[tuple[str, ...]]  # of `SamplingParams`: only sequences that change one of them may need it
    needs_float32: ClassVar[bool] = True  # else it edits logits of any float type

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None: ...

    @classmethod
    def compile_kernels(cls, vocab_size: int, device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
        """Warms up its own kernels on a GPU, for logits of these types."""

    def set(self, slot: int, sequence: EditedSequence) -> bool:
        """Returns whether the sequence, which changes one of `options`, needs this editor. If so, stores what it has
        and its past tokens in `slot`.
        """
        raise NotImplementedError

    def apply(self, logits: torch.Tensor, rows: EditedRows) -> None:
        """Changes only `rows` of logits, [r, vocab_size], contiguous, in place. Float32, if the editor needs that."""
        raise NotImplementedError

    def append(self, rows: EditedRows, token_ids: torch.Tensor) -> None:
        """Takes the tokens of the step's rows: int64 [r] on the device, unknown to the host."""

    def forget(self, slot: int) -> None:
        """The sequence in `slot`, which needs this editor, has ended: nothing large of it stays on the host."""
