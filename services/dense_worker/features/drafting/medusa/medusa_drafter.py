"""`MedusaDrafter`: when the model's Medusa heads run.

Heads take time: each reads a matrix of the size of the model's lm_head. So they run only after a step for whose end the
next plan waits, and then its drafts are theirs. While no drafts are worth it, they run after a step now and then: the
next tokens show how often they are right by now.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.drafting.device_drafter import DeviceDrafter, DraftRequest
from services.dense_worker.features.drafting.drafter import (
    DEVICE_RATE,
    TRIAL_STEPS,
    Acceptance,
    DevicePredictor,
    Drafter,
    Predictor,
)


class MedusaDrafter(Drafter):
    """Every run is one of all heads."""

    def __init__(self, on_device: DeviceDrafter, num_heads: int) -> None:
        self.on_device = on_device
        self._num_heads = num_heads
        self._acceptance = Acceptance(rate=DEVICE_RATE)
        self._num_steps = 0  # without drafts, since the heads ran last

    def begin(self, sequence: Sequence) -> DevicePredictor:
        """Has no drafts before the heads have run."""
        return DevicePredictor(self._acceptance.begin(), self._num_heads, len(sequence.output_token_ids))

    def request(self, predictors: SequenceOf[Predictor], is_held_back: bool) -> DraftRequest | None:
        """Of all heads, for drafts of the next step or for a trial."""
        if not any(isinstance(each, DevicePredictor) for each in predictors):
            return None
        self._num_steps += 1
        if not is_held_back and self._num_steps < TRIAL_STEPS:
            return None
        self._num_steps = 0
        return DraftRequest(self.on_device, self._num_heads)
