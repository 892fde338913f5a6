"""`DevicePredictor`: what the device has drafted for one sequence, and how often that is right."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from services.dense_worker.features.drafting.acceptance import Acceptance

TRIAL_STEPS = 64  # steps without drafts from one trial to the next
DEVICE_RATE = 1 / 16  # weight of the newest draft for any sequence: there are few, and alike for most texts


class DevicePredictor:
    """A `Predictor`. Drafts whose first tokens have come true are kept for the rest."""

    def __init__(self, acceptance: Acceptance, most_drafts: int, num_output_tokens: int) -> None:
        """most_drafts: that the device makes at a time; num_output_tokens: that the sequence has already"""
        self._acceptance = acceptance
        self._most_drafts = most_drafts
        self._num_seen = num_output_tokens
        self._token_ids: list[int] = []  # drafts of the tokens after those seen
        self._is_first = True  # whether none of these has been checked yet

    def take(self, token_ids: SequenceOf[int]) -> None:
        """New drafts, of the tokens after all those that `follow` was given."""
        self._token_ids, self._is_first = list(token_ids), True

    def follow(self, output_token_ids: list[int]) -> None:
        """Compares the tokens of the output that it has not seen yet with their drafts."""
        first, self._num_seen = self._num_seen, len(output_token_ids)
        if not self._token_ids:
            return
        for token_id in output_token_ids[first:]:
            if not self._token_ids:
                break
            is_right = self._token_ids.pop(0) == token_id
            self._acceptance.observe(is_first=self._is_first, is_right=is_right)
            self._is_first = False
            if not is_right:
                self._token_ids.clear()

    def chances(self, num_tokens: int) -> list[float]:
        """See `Predictor.chances`."""
        return self._chances(min(num_tokens, len(self._token_ids)), is_first=self._is_first)

    def next_chances(self, num_tokens: int) -> list[float]:
        """Those of drafts that the device has yet to make, after the step that is being computed."""
        return self._chances(min(num_tokens, self._most_drafts), is_first=True)

    def draft(self, num_tokens: int) -> list[int]:
        """The next tokens, at most `num_tokens`."""
        return self._token_ids[:num_tokens]

    def _chances(self, num_tokens: int, *, is_first: bool) -> list[float]:
        chances, chance = [], 1.0
        for place in range(num_tokens):
            chance *= self._acceptance.first if is_first and place == 0 else self._acceptance.later
            chances.append(chance)
        return chances
