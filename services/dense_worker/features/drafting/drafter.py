"""`Drafter`: what proposes draft tokens, by a `Predictor` for each sequence."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.drafting.device_drafter import DeviceDrafter, DraftRequest
from services.dense_worker.features.drafting.predictor import Predictor


class Drafter:
    """How one method of speculation drafts; this one never does. Engine thread."""

    on_device: DeviceDrafter | None = None  # its part of the model runner; None: it drafts on the host by itself

    def begin(self, sequence: Sequence) -> Predictor:
        """What drafts for a new sequence. A drafter with a part on the device returns a `DevicePredictor`."""
        return Predictor()

    def request(self, predictors: SequenceOf[Predictor], is_held_back: bool) -> DraftRequest | None:
        """What the device drafts after the step under way; None: nothing.

        predictors: of the running sequences, at least one; is_held_back: the next plan waits for the end of the step
        """
        return None

    def note_cost(self, num_steps: float) -> None:
        """How long the device has drafted for the newest request, in steps without drafts."""

    def finish(self, sequence: Sequence) -> None:
        """A sequence has ended, for whatever reason."""
