"""`CopiedText`: guesses that copy text, of the sequence itself or of earlier answers."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.speculation.acceptance import Acceptance
from services.dense_worker.engine.speculation.answer_history import AnswerHistory
from services.dense_worker.engine.speculation.head_predictor import HeadPredictor
from services.dense_worker.engine.speculation.predictor import Predictor


class CopiedText:
    """A `GuessSource`."""

    def __init__(self, lengths: SequenceOf[int], history: AnswerHistory | None = None) -> None:
        """lengths: of the n-grams to look for, rising; history: None: only the sequence's own text is copied"""
        self._lengths = lengths
        self._history = history
        self._acceptance = Acceptance()

    def make_predictor(self, sequence: Sequence) -> Predictor:
        """Looks for the end of the sequence in its text, and in the answers that it may copy from."""
        earlier = [] if self._history is None else self._history.find(sequence)
        return Predictor(self._lengths, self._acceptance.begin(), sequence.spec.prompt_token_ids, earlier)

    def wanted_guesses(self, predictors: SequenceOf[HeadPredictor], is_held_back: bool) -> int:
        """No heads are needed."""
        return 0

    def note_guess_cost(self, num_steps: float) -> None:
        """It has none."""

    def finish(self, sequence: Sequence) -> None:
        """Keeps the answer for later ones."""
        if self._history is not None and len(sequence.output_token_ids) > self._lengths[0]:
            self._history.add(sequence)
