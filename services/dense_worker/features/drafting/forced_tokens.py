"""`ForcedTokens`: the drafts of a sequence whose output has a form, where the form leaves no choice.

They are always accepted: with and without drafts, the mask of each allows only this token.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.grammar.matcher import GrammarMatcher


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """A `Predictor` without uncertainty.

    The last forced token is no draft, but what the step samples after the drafts. So no row of a step comes after the
    end of the form, or needs a mask of which only the matcher knows.
    """

    grammar: GrammarMatcher

    def follow(self, output_token_ids: list[int]) -> None:
        """The runner moves the matcher."""

    def chances(self, num_tokens: int) -> list[float]:
        """1 for each of the next forced tokens but the last."""
        return [1.0] * min(num_tokens, len(self.grammar.forced_tokens) - 1)

    def next_chances(self, num_tokens: int) -> list[float]:
        """The same for the tokens after the next one, which is being computed."""
        return self.chances(1 + num_tokens)[1:]

    def draft(self, num_tokens: int) -> list[int]:
        """The next tokens, at most `num_tokens`."""
        return self.grammar.forced_tokens[:-1][:num_tokens]
