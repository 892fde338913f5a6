"""Errors name the fields that the client sent: the checks know only those of `GenerateRequest`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from services.common.errors import TwostrokeError

_PATH = re.compile(r"(?<![\w'.])[a-z_]+(?:\[\d+\]|\.[a-z_]+)*")
_STEP = re.compile(r"[.\[]")


@contextmanager
def client_field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Renames fields in errors that are raised within it. `names`: the client's field for each of ours.

    Names of ours are whole fields or beginnings of paths, such as `tools[0].function`. In messages a name that is an
    English word, such as `user`, is renamed only at the beginning.
    """
    try:
        yield
    except TwostrokeError as error:
        rename_fields(error, names)
        raise


def rename_fields(error: TwostrokeError, names: Mapping[str, str]) -> None:
    """The same for an error that has been raised."""
    if error.param is not None and names:
        error.param = _PATH.sub(lambda match: _rename(match, names), error.param)
        error.args = (_PATH.sub(lambda match: _rename(match, names), str(error)), *error.args[1:])


def _rename(match: re.Match[str], names: Mapping[str, str]) -> str:
    """The client's name for a path, of which the longest beginning counts that has one."""
    path = match[0]
    ends = [len(path), *(step.start() for step in reversed(list(_STEP.finditer(path))))]
    for end in ends:
        if path[:end] in names and not (path.isalpha() and match.start() > 0):
            return names[path[:end]] + path[end:]
    return path
