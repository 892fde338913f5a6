"""`ModelDrafter`: when a draft model or an EAGLE-3 head runs, and how many tokens it drafts.

It runs after a step for whose end the next plan waits, and then its tokens are the drafts of that plan. Before that a
draft model must compute all tokens of the sequence, a part after each of some steps; a head has them. And it runs now
and then while no drafts are worth it: the next tokens show how often it is right by now.
"""

from __future__ import annotations

import statistics
from collections import deque
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

_WINDOW = 9  # newest runs whose cost counts: the median
_MIN_SHARE = 0.05  # of a step's time, that to draft one token is taken to cost at least


class ModelDrafter(Drafter):
    """Keeps nothing of a sequence that has ended."""

    def __init__(self, on_device: DeviceDrafter, num_tokens: int, max_late_tokens: int | None) -> None:
        """num_tokens: most drafts of a sequence at a time; max_late_tokens: see `ModelPredictor`"""
        self.on_device = on_device
        self._num_tokens = num_tokens
        self._max_late_tokens = max_late_tokens
        self._acceptance = Acceptance(rate=DEVICE_RATE)
        self._num_steps = 0  # since the draft model ran last
        self._num_asked = 1  # tokens that the newest run has drafted
        self._shares = deque[float](maxlen=_WINDOW)  # of a step's time, for one token of all its sequences

    def begin(self, sequence: Sequence) -> ModelPredictor:
        """Has no drafts before the draft model has computed the sequence's tokens."""
        num_output_tokens = len(sequence.output_token_ids)
        return ModelPredictor(self._acceptance.begin(), self._num_tokens, num_output_tokens, self._max_late_tokens)

    def request(self, predictors: SequenceOf[Predictor], is_held_back: bool) -> DraftRequest | None:
        """For drafts of the next step, to make the draft model ready for a sequence, or for a trial.

        As many as are likely enough to be right, as a mean over the sequences, to be worth their time.
        """
        of_model = [each for each in predictors if isinstance(each, ModelPredictor)]
        if not of_model:
            return None
        self._num_steps += 1
        share = max(_MIN_SHARE, statistics.median(self._shares) if self._shares else 0.0)
        is_worth = any(each.needs_tokens and each.likely_first > share for each in of_model)
        if not (is_held_back or is_worth or self._num_steps >= TRIAL_STEPS):
            return None
        self._num_steps = 0
        for each in of_model:
            each.ask()
        chances = [each.next_chances(self._num_tokens) for each in of_model if each.is_ready]
        likely = [sum(column) / len(chances) for column in zip(*chances, strict=True)] if chances else []
        self._num_asked = max(1, sum(chance > share for chance in likely))
        return DraftRequest(self.on_device, self._num_asked)

    def note_cost(self, num_steps: float) -> None:
        """Its share falls with the number of tokens."""
        self._shares.append(num_steps / self._num_asked)


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
