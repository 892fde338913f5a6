"""The command line of `python -m services.launch`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from services.common.cli import add_config_arguments, dashed
from services.common.config import Config, load_config, toml_value
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


def parse_args(argv: Sequence[str], program: str = "services.launch") -> tuple[Config, argparse.Namespace]:
    """Flags are short forms of config keys. An invalid config ends the process with one line and status 1."""
    parser = argparse.ArgumentParser(
        prog=program, description="Starts, watches and stops all services on one machine."
    )
    add_config_arguments(parser)
    parser.add_argument("--model", metavar="DIR", help="Hugging Face model directory (model.path)")
    parser.add_argument("--load-format", choices=["safetensors", "dummy"], help="dummy: random weights")
    parser.add_argument("--num-layers", type=int, metavar="N", help="run only the first N layers")
    parser.add_argument("--speculative-config", metavar="JSON", help='{"method": "ngram"}, as for vLLM')
    parser.add_argument("--gateway-processes", type=int, metavar="N", help="gateways at the same ports (1)")
    parser.add_argument("--access-log", action="store_true", default=None, help="log each answer (log.access)")
    parser.add_argument("--prompt", metavar="TEXT", help="stream the answer to TEXT, then stop")
    parser.add_argument("--sample-prompt", metavar="TEXT", help="stream the answer to TEXT, then keep serving")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of that answer (64)")
    arguments = parser.parse_args(dashed(argv))
    if arguments.max_tokens is None:
        arguments.max_tokens = 64
    elif arguments.prompt is None and arguments.sample_prompt is None:
        parser.error("--max-tokens is of the answer to --prompt or --sample-prompt, and neither is given")
    flags = {
        "model.path": arguments.model,
        "model.load_format": arguments.load_format,
        "model.num_layers": arguments.num_layers,
        "launch.gateway_processes": arguments.gateway_processes,
        "log.access": arguments.access_log,
    }
    try:
        if arguments.speculative_config is not None:
            flags |= read_speculative_config(arguments.speculative_config)
        overrides = [f"{key}={toml_value(value)}" for key, value in flags.items() if value is not None]
        return load_config(arguments.config, [*overrides, *arguments.set]), arguments
    except ConfigError as error:
        parser.exit(1, f"{program}: {error}\n")


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
