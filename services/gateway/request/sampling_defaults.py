"""What a request samples with where it says nothing: the options in a checkpoint's generation_config.json.

vLLM and SGLang do the same for the APIs of OpenAI and those beside them. Other APIs have defaults of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from services.common.errors import ConfigError, InvalidRequest, ModelError
from services.common.json_files.read_json import read_json
from services.common.sampling_params import SamplingParams
from services.common.shorten import quote, show

FILE = "generation_config.json"
KEY = "gateway.sampling_overrides"
OPTIONS = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float}
ALL = (0, -1)  # of top_k: all tokens
MAX_INTEGER = 2**31 - 1  # what a message may have as top_k

SamplingDefaults = Mapping[str, float]
NO_DEFAULTS: SamplingDefaults = MappingProxyType({})


def read_sampling_defaults(path: Path) -> SamplingDefaults:
    """The options that the checkpoint in `path` names. Raises ModelError for a value that no request may have."""
    found = {name: value for name, value in (read_json(path / FILE) or {}).items() if name in OPTIONS}
    try:
        return _checked({name: value for name, value in found.items() if value is not None})
    except InvalidRequest as error:
        raise ModelError(f"{FILE} in {path}: {error}") from error


def override(defaults: SamplingDefaults, entries: Sequence[str]) -> SamplingDefaults:
    """`defaults`, but with the options in `entries`, each as "NAME=NUMBER". Raises ConfigError, which names the option.

    A `top_k` of 0 or -1 takes away the checkpoint's.
    """
    given: dict[str, object] = {}
    for entry in entries:
        name, _, text = entry.partition("=")
        if name not in OPTIONS:
            raise ConfigError(f"{KEY} has {quote(name)}; it may have {', '.join(OPTIONS)}")
        if name in given:
            raise ConfigError(f"{KEY} has {quote(name)} twice")
        try:
            given[name] = OPTIONS[name](text)
        except ValueError as error:
            raise ConfigError(f"{KEY} has {name} {quote(text)}, expected {_kind(name)}") from error
    try:
        checked = _checked(given)
    except InvalidRequest as error:
        raise ConfigError(f"{KEY}: {error}") from error
    return {name: value for name, value in defaults.items() if name not in given} | checked


def _kind(name: str) -> str:
    return "an integer" if OPTIONS[name] is int else "a number"


def _checked(options: Mapping[str, object]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in options.items():
        if type(value) not in (OPTIONS[name], int):
            raise InvalidRequest(f"{name} is {show(value)}, expected {_kind(name)}")
        if name == "top_k" and value in ALL:
            continue
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise InvalidRequest(f"{name} is {show(value)}, at most {MAX_INTEGER} allowed")
        found[name] = OPTIONS[name](value)  # type: ignore[arg-type]
        SamplingParams(**{name: found[name]}).validate()  # type: ignore[arg-type]
    return found
