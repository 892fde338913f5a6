"""`ForcedTokens`: drafts that are certain, as where a grammar leaves no choice."""

from __future__ import annotations

from services.dense_worker.features.drafting.acceptance import Acceptance
from services.dense_worker.features.sequence_feature import SequenceFeature

MAX_FORCED = 16  # of a sequence in a step


class ForcedTokens:
    """A `Predictor`. Its drafts are always right; it learns how many there usually are after a token that is chosen."""

    def __init__(self, feature: SequenceFeature, usual: Acceptance) -> None:
        """feature: that forces them; usual: `first` and `later` are how often there is one, and another one after it"""
        self._feature = feature
        self._usual = usual
        self._num_seen: int | None = None  # output tokens; None: none yet
        self._num_forced = 0  # tokens that were forced after these

    def follow(self, output_token_ids: list[int]) -> None:
        """The feature follows by itself: counts what it forces now."""
        num_new = len(output_token_ids) - (self._num_seen or 0)
        is_chosen = num_new > self._num_forced  # the newest one; those before it were forced
        if self._num_seen is not None and not num_new:
            return
        self._num_seen, self._num_forced = len(output_token_ids), len(self._feature.forced_token_ids)
        if is_chosen:
            for place in range(self._num_forced + 1):
                self._usual.observe(is_first=place == 0, is_right=place < self._num_forced)

    def chances(self, num_tokens: int) -> list[float]:
        """1 for each of the next forced tokens."""
        return [1.0] * min(num_tokens, len(self._feature.forced_token_ids))

    def next_chances(self, num_tokens: int) -> list[float]:
        """Those after the next token: it is forced itself, and more are known, or it is chosen."""
        if self._num_forced:
            return self.chances(1 + num_tokens)[1:]
        usual = self._usual
        return [usual.first * usual.later**place for place in range(num_tokens)]

    def draft(self, num_tokens: int) -> list[int]:
        """The next tokens, at most `num_tokens`."""
        return list(self._feature.forced_token_ids[:num_tokens])
