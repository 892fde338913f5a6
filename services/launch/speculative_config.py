"""`--speculative-config`: how a user of vLLM configures speculation, as keys of our config."""

from __future__ import annotations

import json

from services.common.errors import ConfigError
from services.common.shorten import quote, show

FLAG = "--speculative-config"
_MODEL = "model"  # the directory of trained weights
# Its name in the section `scheduler`.
_MODEL_KEYS = {"medusa": "speculation_model", "eagle3": "speculation_model", "draft_model": "draft_model"}
# By method: vLLM's keys, which are otherwise the names in the section `scheduler`.
_KEYS = {
    "ngram": ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
    "suffix": ("num_speculative_tokens",),
    "medusa": (_MODEL, "num_speculative_tokens"),
    "eagle3": (_MODEL, "num_speculative_tokens"),
    "draft_model": (_MODEL, "num_speculative_tokens"),
}
METHODS = tuple(_KEYS)
_NGRAM_MODEL = "[ngram]"  # how older versions of vLLM name the method


def read_speculative_config(text: str) -> dict[str, object]:
    """The keys of the config, with their values, that the JSON text stands for.

    Raises `ConfigError` for text that is no JSON object, and for methods and keys that are not supported, by name.
    """
    try:
        given = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{FLAG} {quote(text)} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{FLAG} {quote(text)} is not a JSON object")
    method = given.pop("method", None)
    if given.get("model") == _NGRAM_MODEL:
        del given["model"]
        method = method or "ngram"
    if method is None and _MODEL in given:
        method = "draft_model"  # as in vLLM
    if method is None:
        raise ConfigError(f"{FLAG} names no method: {' or '.join(METHODS)} is required")
    if method not in METHODS:
        raise ConfigError(f"{FLAG} has the method {show(method)}; only {' and '.join(METHODS)} are supported")
    for key, value in given.items():
        if key not in _KEYS[method]:
            supported = ", ".join(_KEYS[method])
            raise ConfigError(f"{FLAG} has the key {show(key)}; with the method {method!r} it may have {supported}")
        kind, expected = (str, "a string") if key == _MODEL else (int, "an integer")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{FLAG} has {key} {show(value)}, which is not {expected}")
    shortest, longest = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    if (shortest is None) != (longest is None):  # in vLLM, one of them stands for both
        given["prompt_lookup_min"] = given["prompt_lookup_max"] = longest if shortest is None else shortest
    keys = {f"scheduler.{_MODEL_KEYS[method] if key == _MODEL else key}": value for key, value in given.items()}
    return {"scheduler.speculation": method} | keys
