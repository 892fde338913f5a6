"""`ForcedTokens`: the drafts of a sequence of which some next tokens are certain, as where a form leaves no choice.

They are always accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.dense_worker.features.sequence_feature import SequenceFeature


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """A `Predictor` without uncertainty.

    The last forced token is no draft, but what the step samples after the drafts. So every row of a step has a forced
    token.
    """

    feature: SequenceFeature  # that forces them

    def follow(self, output_token_ids: list[int]) -> None:
        """The feature follows by itself."""

    def chances(self, num_tokens: int) -> list[float]:
        """1 for each of the next forced tokens but the last."""
        return [1.0] * min(num_tokens, len(self.feature.forced_token_ids) - 1)

    def next_chances(self, num_tokens: int) -> list[float]:
        """The same for the tokens after the next one, which is being computed."""
        return self.chances(1 + num_tokens)[1:]

    def draft(self, num_tokens: int) -> list[int]:
        """The next tokens, at most `num_tokens`."""
        return list(self.feature.forced_token_ids[:-1][:num_tokens])
