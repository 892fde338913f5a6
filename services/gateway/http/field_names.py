"""Errors name the fields that the client sent: the checks know only those of `GenerateRequest`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from services.common.errors import TwostrokeError


@contextmanager
def client_field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Renames fields in errors that are raised within it. `names`: the client's field for each of ours.

    Names of ours are whole fields or beginnings of paths, such as `tools[0].function`. In messages a name that is an
    English word, such as `user`, is renamed only at the beginning.
    """
    try:
        yield
    except TwostrokeError as error:
        if error.param is not None and names:
            words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
            field = re.compile(rf"(?<![\w'.])(?:{words})(?![\w'])")

            def rename(match: re.Match[str]) -> str:
                is_word = match[0].isalpha() and match.start() > 0
                return match[0] if is_word else names[match[0]]

            error.param = field.sub(rename, error.param, count=1)
            error.args = (field.sub(rename, str(error)), *error.args[1:])
        raise
