"""How texts and schemas stand in grammars."""

from __future__ import annotations

import json

# A schema may have options of llguidance (`x-guidance`), but none by which an output would not be valid.
STRICT = {"lenient": False, "coerce_one_of": False}
# Without a bound, models that are unsure write whitespace up to max_tokens.
DEFAULTS = {"whitespace_pattern": " "}


def quote(text: str) -> str:
    """A string literal of Lark; every character stands for itself."""
    return json.dumps(text, ensure_ascii=False)
