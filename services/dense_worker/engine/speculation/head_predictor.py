"""`HeadPredictor`: the guesses that heads of the model have made for one sequence, and how often they are right."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from services.dense_worker.engine.speculation.acceptance import Acceptance


class HeadPredictor:
    """Belongs to one sequence; has the methods of `Predictor`.

    Guesses whose first tokens have come true are kept for the rest.
    """

    def __init__(self, acceptance: Acceptance, num_heads: int, num_output_tokens: int) -> None:
        """num_output_tokens: that the sequence has already"""
        self._acceptance = acceptance
        self._num_heads = num_heads
        self._num_seen = num_output_tokens
        self._guesses: list[int] = []  # of the tokens after those seen
        self._is_first = True  # whether none of these guesses has been checked yet

    def take(self, guesses: SequenceOf[int]) -> None:
        """New guesses, of the tokens after all those that `follow` was given."""
        self._guesses, self._is_first = list(guesses), True

    def follow(self, output_token_ids: list[int]) -> None:
        """Compares the tokens of the output that it has not seen yet with their guesses."""
        first, self._num_seen = self._num_seen, len(output_token_ids)
        if not self._guesses:
            return
        for token_id in output_token_ids[first:]:
            if not self._guesses:
                break
            is_right = self._guesses.pop(0) == token_id
            self._acceptance.observe(is_first=self._is_first, is_right=is_right)
            self._is_first = False
            if not is_right:
                self._guesses.clear()

    def chances(self, num_tokens: int) -> list[float]:
        """For each guess of the next tokens, the probability that it and all before it are right."""
        return self._chances(min(num_tokens, len(self._guesses)), is_first=self._is_first)

    def next_chances(self, num_tokens: int) -> list[float]:
        """The same for guesses that the heads have yet to make, after the step that is being computed."""
        return self._chances(min(num_tokens, self._num_heads), is_first=True)

    def guess(self, num_tokens: int) -> list[int]:
        """The next tokens, at most `num_tokens`."""
        return self._guesses[:num_tokens]

    def _chances(self, num_tokens: int, *, is_first: bool) -> list[float]:
        chances, chance = [], 1.0
        for place in range(num_tokens):
            chance *= self._acceptance.first if is_first and place == 0 else self._acceptance.later
            chances.append(chance)
        return chances
