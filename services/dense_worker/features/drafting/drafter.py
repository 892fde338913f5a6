"""`Drafter`: what proposes draft tokens, and `Predictor`, what it has of one sequence."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.drafting.device_drafter import DeviceDrafter, DraftRequest


class Predictor:
    """Belongs to one sequence, and has no drafts; subclasses have some.

    Learns how often its drafts are right also when no step has them.
    """

    def follow(self, output_token_ids: list[int]) -> None:
        """Takes the tokens of prompt and output that it has not seen yet. Called before the other methods."""

    def chances(self, num_tokens: int) -> list[float]:
        """For each draft of the next tokens, the probability that it and all before it are right; falling."""
        return []

    def next_chances(self, num_tokens: int) -> list[float]:
        """The same for the tokens after the next one, which is being computed."""
        return []

    def draft(self, num_tokens: int) -> list[int]:
        """The next tokens, at most `num_tokens`."""
        return []


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
