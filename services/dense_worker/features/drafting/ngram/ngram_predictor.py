"""`NgramDrafter`: drafts that copy text. `NgramPredictor` copies how one sequence may go on, from its own tokens and
from earlier answers.

It follows the sequence, and learns how often its drafts are right also when no step has them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf

from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.features.drafting.drafter import Acceptance, Drafter, Predictor
from services.dense_worker.features.drafting.ngram.answer_history import AnswerHistory
from services.dense_worker.features.drafting.ngram.ngram_index import SEPARATOR, NgramIndex

MAX_TOKENS_AT_A_TIME = 16_384  # that `follow` takes: about a millisecond


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


class NgramPredictor(Predictor):
    """A draft is what followed the longest n-gram that the sequence ends with."""

    def __init__(
        self,
        lengths: SequenceOf[int],
        acceptance: Acceptance,
        prompt_token_ids: SequenceOf[int],
        earlier: SequenceOf[NgramIndex] = (),
    ) -> None:
        """lengths: of the n-grams, rising; earlier: other texts to copy from"""
        self._acceptance = acceptance
        self._earlier = earlier
        self._longest = lengths[-1]
        self._prompt_token_ids = prompt_token_ids
        self._own = self._source = NgramIndex(lengths, num_expected_tokens=len(prompt_token_ids))
        self._position: int | None = None  # of the next draft in `_source`; None: there is none
        self._is_first = True  # whether no draft at this match has been checked yet
        self.follow([])

    def follow(self, output_token_ids: list[int]) -> None:
        """Takes the tokens of prompt and output that it has not seen yet.

        A long text takes several calls; there are no drafts before it is complete.
        """
        num_seen, num_prompt_tokens = len(self._own.tokens), len(self._prompt_token_ids)
        if num_seen < num_prompt_tokens:
            new = self._prompt_token_ids[num_seen : num_seen + MAX_TOKENS_AT_A_TIME]
        else:
            first = num_seen - num_prompt_tokens
            new = output_token_ids[first : first + MAX_TOKENS_AT_A_TIME]
        if not new:
            return
        self._own.extend(new)
        for token_id in new:
            if self._position is None:
                break
            self._check(self._position, token_id)
        if self._position is None:
            self._own.note_ngrams()
        is_complete = len(self._own.tokens) == num_prompt_tokens + len(output_token_ids)
        if self._position is None and is_complete:
            self._find()
        elif not is_complete:
            self._position = None

    def settle(self) -> None:
        """Notes the n-grams of tokens that came as they were drafted, since no lookup has needed them."""
        self._own.note_ngrams()

    def chances(self, num_tokens: int) -> list[float]:
        """See `Predictor.chances`."""
        if self._position is None:
            return []
        later = self._acceptance.later
        chances = [self._acceptance.first if self._is_first else later]
        while len(chances) < num_tokens:
            chances.append(chances[-1] * later)
        return chances

    def next_chances(self, num_tokens: int) -> list[float]:
        """The same for the tokens after the next one, which is being computed."""
        return self.chances(1 + num_tokens)[1:]

    def draft(self, num_tokens: int) -> list[int]:
        """The next tokens, at most `num_tokens`."""
        if self._position is None:
            return []
        found = self._source.tokens[self._position : self._position + num_tokens].tolist()
        if self._source is self._own:  # at its end the text repeats what is being copied
            return (found * -(-num_tokens // len(found)))[:num_tokens]
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found

    def _check(self, position: int, token_id: int) -> None:
        """Compares a token with the draft at a position, and goes on behind it."""
        is_right = self._source.tokens[position] == token_id
        self._acceptance.observe(is_first=self._is_first, is_right=is_right)
        self._is_first = False
        self._position = position + 1 if is_right else None
        if is_right and self._source is not self._own and self._is_at_end(position + 1):
            self._position = None

    def _is_at_end(self, position: int) -> bool:
        tokens = self._source.tokens
        return position >= len(tokens) or tokens[position] == SEPARATOR

    def _find(self) -> None:
        """Looks for the end of the sequence: in its own tokens, and in earlier texts if they match further back."""
        match, self._source = self._own.find_end(), self._own
        if self._earlier and (match is None or match.length < self._longest):
            recent: array[int] = self._own.tokens[-self._longest :]
            for index in self._earlier:
                other = index.find(recent)
                if other is None or index.tokens[other.position] == SEPARATOR:
                    continue
                if match is None or other.length > match.length:
                    match, self._source = other, index
        self._position = None if match is None else match.position
        self._is_first = True
