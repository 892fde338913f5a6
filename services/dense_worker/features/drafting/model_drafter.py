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
from services.dense_worker.features.drafting.acceptance import Acceptance
from services.dense_worker.features.drafting.device_drafter import DeviceDrafter, DraftRequest
from services.dense_worker.features.drafting.device_predictor import DEVICE_RATE, TRIAL_STEPS
from services.dense_worker.features.drafting.drafter import Predictor
from services.dense_worker.features.drafting.model_predictor import ModelPredictor

_WINDOW = 9  # newest runs whose cost counts: the median
_MIN_SHARE = 0.05  # of a step's time, that to draft one token is taken to cost at least


class ModelDrafter:
    """A `Drafter`."""

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

    def finish(self, sequence: Sequence) -> None:
        """Nothing is kept."""
