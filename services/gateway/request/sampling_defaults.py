"""What a request samples with where it says nothing: the options in a checkpoint's generation_config.json.

vLLM and SGLang do the same for the APIs of OpenAI and those beside them. Other APIs have defaults of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from services.common.errors import InvalidRequest, ModelError
from services.common.json_files.read_json import read_json
from services.common.sampling_params import SamplingParams
from services.common.shorten import show

FILE = "generation_config.json"
OPTIONS = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float}
ALL = (0, -1)  # of top_k: all tokens

SamplingDefaults = Mapping[str, float]
NO_DEFAULTS: SamplingDefaults = MappingProxyType({})


def read_sampling_defaults(path: Path) -> SamplingDefaults:
    """The options that the checkpoint in `path` names. Raises ModelError for a value that no request may have."""
    found: dict[str, float] = {}
    for name, value in (read_json(path / FILE) or {}).items():
        if name not in OPTIONS or value is None:
            continue
        if type(value) not in (OPTIONS[name], int):
            raise ModelError(f"{FILE} in {path} has {name} {show(value)}, expected a number")
        if name == "top_k" and value in ALL:
            continue
        found[name] = OPTIONS[name](value)
        try:
            SamplingParams(**{name: found[name]}).validate()  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise ModelError(f"{FILE} in {path}: {error}") from error
    return found
