"""Lists of layers in a checkpoint's quantization: which layers are quantized in which way, and which are not."""

from __future__ import annotations

import fnmatch

from services.common.errors import ModelError
from services.common.json_files.fields import Fields
from services.common.json_files.patterns import PatternError, PatternMatcher, compile_pattern
from services.common.shorten import show

MAX_MATCHING_S = 1.0  # for a layer and all patterns of a list
_PATTERN = "re:"
_WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.")  # of models with images


def read_layers(fields: Fields, *names: str) -> tuple[str, ...]:
    """A list of layers, from all of these fields. An absent one is empty."""
    entries: list[str] = []
    for name in names:
        values = fields.get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise fields.unsupported(name, values, "a list of names")
        entries += values
    for entry in entries:
        if entry.startswith(_PATTERN):
            try:
                compile_pattern(entry.removeprefix(_PATTERN))
            except PatternError as error:
                raise ModelError(f"{fields.where} lists {show(entry)}: {error}") from error
    return tuple(entries)


def is_listed(name: str, entries: tuple[str, ...]) -> bool:
    """Whether a list of layers contains the layer of this name.

    An entry is a regular expression that matches from the start ("re:.*q_proj"), a pattern with wildcards
    ("model.layers.0.*"), whole parts of a name ("lm_head", "model.layers.0", "mlp.gate_proj"), or "Linear" for all.
    Raises ModelError if the regular expressions take longer than `MAX_MATCHING_S`.
    """
    matcher = PatternMatcher(MAX_MATCHING_S)
    try:
        return any(_matches(name, entry, matcher) for entry in entries)
    except PatternError as error:
        raise ModelError(f"the quantization's lists of layers, for {name}: {error}") from error


def _matches(name: str, entry: str, matcher: PatternMatcher) -> bool:
    if entry == "Linear":
        return True
    entry = next((entry.removeprefix(each) for each in _WRAPPERS if entry.startswith(each)), entry)
    if entry.startswith(_PATTERN):
        return matcher.match(entry.removeprefix(_PATTERN), name) is not None
    if any(character in entry for character in "*?["):
        return fnmatch.fnmatchcase(name, entry) or fnmatch.fnmatchcase(name, f"{entry}.*")
    return f".{entry}." in f".{name}."
