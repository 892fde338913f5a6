"""`ModelPredictor`: the drafts of a draft model or an EAGLE-3 head for one sequence, and whether it can draft more."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from services.dense_worker.features.drafting.acceptance import Acceptance
from services.dense_worker.features.drafting.device_predictor import DevicePredictor


class ModelPredictor(DevicePredictor):
    """A `DevicePredictor` that expects drafts only while the draft model has nearly all tokens of the sequence."""

    def __init__(
        self, acceptance: Acceptance, num_tokens: int, num_output_tokens: int, max_late_tokens: int | None
    ) -> None:
        """num_tokens: most drafts at a time; num_output_tokens: that the sequence has already.

        max_late_tokens: that the draft model may lack when it is asked for drafts; None: it never lacks any, but it
        may have no room for the sequence
        """
        super().__init__(acceptance, num_tokens, num_output_tokens)
        self._max_late_tokens = max_late_tokens
        self._num_drafted: int | None = None  # output tokens when it was last ready; None: it is not
        self._is_asked = False  # whether the draft model has been asked and has not answered: perhaps there is no room

    @property
    def is_ready(self) -> bool:
        """Whether the draft model would draft when it is asked."""
        if self._num_drafted is None:
            return False
        return self._max_late_tokens is None or self._num_seen - self._num_drafted <= self._max_late_tokens

    @property
    def needs_tokens(self) -> bool:
        """Whether the draft model could be made ready."""
        return not self.is_ready and not self._is_asked

    @property
    def likely_first(self) -> float:
        """The probability that a first draft is right."""
        return self._acceptance.first

    def ask(self) -> None:
        """The draft model is asked for drafts."""
        if self._is_asked and self._max_late_tokens is None:
            self._num_drafted = None  # it has not answered: there was no room
        self._is_asked = True

    def take(self, token_ids: SequenceOf[int]) -> None:
        """New drafts; none if the draft model is not ready yet."""
        super().take(token_ids)
        self._is_asked = False
        self._num_drafted = self._num_seen if token_ids else None

    def next_chances(self, num_tokens: int) -> list[float]:
        """None if the draft model is not ready."""
        return super().next_chances(num_tokens) if self.is_ready else []
