"""`HeadGuesses`: guesses of the model's Medusa heads, and when these run.

Heads take time: each reads a matrix of the size of the model's lm_head. So they run only after a step for whose end the
next plan waits, and then their guesses become drafts. While no drafts are worth it, they run after a step now and then:
the next tokens show how often their guesses are right by now.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.speculation.acceptance import Acceptance
from services.dense_worker.engine.speculation.head_predictor import HeadPredictor

TRIAL_STEPS = 64  # steps without drafts from one trial to the next
_TYPICAL_RATE = 1 / 16  # weight of the newest guess for any sequence: there are few, and heads are alike for most texts


class HeadGuesses:
    """A `GuessSource`."""

    def __init__(self, num_heads: int) -> None:
        self._num_heads = num_heads
        self._acceptance = Acceptance(rate=_TYPICAL_RATE)
        self._num_steps = 0  # without drafts, since the heads ran last

    def make_predictor(self, sequence: Sequence) -> HeadPredictor:
        """Has no guesses before the heads have run."""
        return HeadPredictor(self._acceptance.begin(), self._num_heads, len(sequence.output_token_ids))

    def wanted_guesses(self, predictors: SequenceOf[HeadPredictor], is_held_back: bool) -> int:
        """Those of all heads, for drafts of the next step or for a trial."""
        self._num_steps += 1
        if not is_held_back and self._num_steps < TRIAL_STEPS:
            return 0
        self._num_steps = 0
        return self._num_heads

    def note_guess_cost(self, num_steps: float) -> None:
        """It is always that of all heads."""

    def finish(self, sequence: Sequence) -> None:
        """Nothing is kept."""
