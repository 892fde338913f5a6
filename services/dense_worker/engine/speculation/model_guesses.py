"""`ModelGuesses`: guesses of a draft model or of an EAGLE-3 head, when it runs, and how many tokens it guesses.

It runs after a step for whose end the next plan waits, and then its guesses become drafts. Before that a draft model
must compute all tokens of the sequence, a part after each of some steps; a head has them. And it runs now and then
while no drafts are worth it: the next tokens show how often it is right by now.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence as SequenceOf

from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.speculation.acceptance import Acceptance
from services.dense_worker.engine.speculation.head_guesses import TRIAL_STEPS
from services.dense_worker.engine.speculation.head_predictor import HeadPredictor
from services.dense_worker.engine.speculation.model_predictor import ModelPredictor

_TYPICAL_RATE = 1 / 16  # weight of the newest guess for any sequence, as of heads
_WINDOW = 9  # newest runs whose cost counts: the median
_MIN_SHARE = 0.05  # of a step's time, that a guess is taken to cost at least


class ModelGuesses:
    """A `GuessSource`."""

    def __init__(self, num_tokens: int, max_late_tokens: int | None) -> None:
        """num_tokens: most guesses of a sequence at a time; max_late_tokens: see `ModelPredictor`"""
        self._num_tokens = num_tokens
        self._max_late_tokens = max_late_tokens
        self._acceptance = Acceptance(rate=_TYPICAL_RATE)
        self._num_steps = 0  # since the draft model ran last
        self._num_asked = 1  # guesses of the newest run
        self._shares = deque[float](maxlen=_WINDOW)  # of a step's time, for a guess of all its sequences

    def make_predictor(self, sequence: Sequence) -> ModelPredictor:
        """Has no guesses before the draft model has computed the sequence's tokens."""
        num_output_tokens = len(sequence.output_token_ids)
        return ModelPredictor(self._acceptance.begin(), self._num_tokens, num_output_tokens, self._max_late_tokens)

    def wanted_guesses(self, predictors: SequenceOf[HeadPredictor], is_held_back: bool) -> int:
        """For drafts of the next step, to make the draft model ready for a sequence, or for a trial.

        As many as are likely enough to be right, as a mean over the sequences, to be worth their time.
        """
        self._num_steps += 1
        share = max(_MIN_SHARE, statistics.median(self._shares) if self._shares else 0.0)
        of_model = [each for each in predictors if isinstance(each, ModelPredictor)]
        is_worth = any(each.needs_tokens and each.likely_first > share for each in of_model)
        if not (is_held_back or is_worth or self._num_steps >= TRIAL_STEPS):
            return 0
        self._num_steps = 0
        for each in of_model:
            each.ask()
        chances = [each.next_chances(self._num_tokens) for each in of_model if each.is_ready]
        likely = [sum(column) / len(chances) for column in zip(*chances, strict=True)] if chances else []
        self._num_asked = max(1, sum(chance > share for chance in likely))
        return self._num_asked

    def note_guess_cost(self, num_steps: float) -> None:
        """Its share falls with the number of tokens."""
        self._shares.append(num_steps / self._num_asked)

    def finish(self, sequence: Sequence) -> None:
        """Nothing is kept."""
