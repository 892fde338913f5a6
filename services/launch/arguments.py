"""The command line of `twostroke serve` and `python -m services.launch`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from services.common.cli import add_config_arguments, dashed
from services.common.config import Config, load_config, toml_value
from services.common.errors import ConfigError
from services.launch.flags import FLAGS, add_flags, describe_unknown, read_flags, read_http_address

OWN_FLAGS = ("--help", "--config", "--set", "--prompt", "--sample-prompt", "--max-tokens")


def parse_args(argv: Sequence[str], program: str = "services.launch") -> tuple[Config, argparse.Namespace]:
    """Flags are short forms of config keys. An invalid config ends the process with one line and status 1."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [MODEL] [OPTIONS]",
        description="Starts, watches and stops all services on one machine.",
    )
    parser.add_argument("directory", nargs="?", metavar="MODEL", help="Hugging Face model directory")
    add_config_arguments(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="stream the answer to TEXT, then stop")
    parser.add_argument("--sample-prompt", metavar="TEXT", help="stream the answer to TEXT, then keep serving")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of that answer (64)")
    add_flags(parser.add_argument_group("short forms of keys of the config, by the names of vLLM where it has them"))
    arguments, unknown = parser.parse_known_args(dashed(argv))
    if unknown:
        parser.error(describe_unknown(unknown, [*OWN_FLAGS, *(flag.name for flag in FLAGS)]))
    if arguments.max_tokens is None:
        arguments.max_tokens = 64
    elif arguments.prompt is None and arguments.sample_prompt is None:
        parser.error("--max-tokens is of the answer to --prompt or --sample-prompt, and neither is given")
    if arguments.directory is not None and arguments.model is not None:
        parser.error(f"MODEL {arguments.directory!r} and --model {arguments.model!r} mean the same: give one of them")
    if arguments.directory is not None:
        arguments.model = arguments.directory
    try:
        return _load(arguments), arguments
    except ConfigError as error:
        parser.exit(1, f"{program}: {error}\n")


def _load(arguments: argparse.Namespace) -> Config:
    """The config: the file, then flags, then `--set`; the last one of a key wins. Raises `ConfigError`."""
    overrides = [f"{key}={toml_value(value)}" for key, value in read_flags(arguments).items()]
    config = load_config(arguments.config, [*overrides, *arguments.set])
    http_address = read_http_address(arguments, config)
    if http_address is None:
        return config
    return load_config(
        arguments.config, [*overrides, f"gateway.http_address={toml_value(http_address)}", *arguments.set]
    )
