"""How many examples of a property a run tries: few in `make test`, all in `make chaos` and by plain pytest."""

from __future__ import annotations

from hypothesis import settings

QUICK = "quick"  # hypothesis' profile of `make test`
MAX_QUICK_EXAMPLES = 25


def examples(number: int, most: int = MAX_QUICK_EXAMPLES) -> int:
    """How often to try what is worth `number` tries: at most `most` in `make test`.

    Of a property that is the number for `hypothesis.settings(max_examples=...)`.
    """
    return min(number, most) if settings.get_current_profile_name() == QUICK else number
