"""`NgramDrafter`: drafts that copy text, of the sequence itself or of earlier answers."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.drafting.acceptance import Acceptance
from services.dense_worker.features.drafting.drafter import Drafter
from services.dense_worker.features.drafting.ngram.answer_history import AnswerHistory
from services.dense_worker.features.drafting.ngram.ngram_predictor import NgramPredictor


class NgramDrafter(Drafter):
    """Copies text, for which it needs no device."""

    def __init__(self, lengths: SequenceOf[int], history: AnswerHistory | None = None) -> None:
        """lengths: of the n-grams to look for, rising; history: None: only the sequence's own text is copied"""
        self._lengths = lengths
        self._history = history
        self._acceptance = Acceptance()

    def begin(self, sequence: Sequence) -> NgramPredictor:
        """Looks for the end of the sequence in its text, and in the answers that it may copy from."""
        earlier = [] if self._history is None else self._history.find(sequence)
        return NgramPredictor(self._lengths, self._acceptance.begin(), sequence.spec.prompt_token_ids, earlier)

    def finish(self, sequence: Sequence) -> None:
        """Keeps the answer for later ones."""
        if self._history is not None and len(sequence.output_token_ids) > self._lengths[0]:
            self._history.add(sequence)
