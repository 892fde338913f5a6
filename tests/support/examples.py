"""How many examples of a property a run tries: few in `make test`, all in `make chaos` and by plain pytest."""

from __future__ import annotations

from hypothesis import settings

QUICK = "quick"  # hypothesis' profile of `make test`
MAX_QUICK_EXAMPLES = 25


def examples(number: int) -> int:
    """The number of examples of a property that is worth `number`, for `hypothesis.settings(max_examples=...)`."""
    return min(number, MAX_QUICK_EXAMPLES) if settings.get_current_profile_name() == QUICK else number
