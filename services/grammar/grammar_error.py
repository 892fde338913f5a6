"""`GrammarError`: a grammar of structured output that cannot be used."""

from __future__ import annotations


class GrammarError(ValueError):
    """Says what is wrong with the grammar, in words for the client.

    `origin`: the field of the client's request that is wrong, where it is known to be a part of what was compiled.
    """

    def __init__(self, message: str, origin: str | None = None) -> None:
        super().__init__(message)
        self.origin = origin


class SlowGrammarError(GrammarError):
    """The grammar took longer than allowed. On a less busy machine it might not have: this is no lasting verdict."""
