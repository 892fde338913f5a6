"""The command line of `python -m services.launch`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from services.common.cli import add_config_arguments, dashed
from services.common.config import Config, load_config, toml_value
from services.common.errors import ConfigError


def parse_args(argv: Sequence[str]) -> tuple[Config, argparse.Namespace]:
    """Flags are short forms of config keys. An invalid config ends the process with one line and status 1."""
    parser = argparse.ArgumentParser(
        prog="services.launch", description="Starts, watches and stops all services on one machine."
    )
    add_config_arguments(parser)
    parser.add_argument("--model", metavar="DIR", help="Hugging Face model directory (model.path)")
    parser.add_argument("--load-format", choices=["safetensors", "dummy"], help="dummy: random weights")
    parser.add_argument("--num-layers", type=int, metavar="N", help="run only the first N layers")
    parser.add_argument("--gateway-processes", type=int, metavar="N", help="gateways at the same ports (1)")
    parser.add_argument("--prompt", metavar="TEXT", help="stream the answer to TEXT, then stop")
    parser.add_argument("--sample-prompt", metavar="TEXT", help="stream the answer to TEXT, then keep serving")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens of that answer (64)")
    arguments = parser.parse_args(dashed(argv))
    flags = {
        "model.path": arguments.model,
        "model.load_format": arguments.load_format,
        "model.num_layers": arguments.num_layers,
        "launch.gateway_processes": arguments.gateway_processes,
    }
    overrides = [f"{key}={toml_value(value)}" for key, value in flags.items() if value is not None]
    try:
        return load_config(arguments.config, [*overrides, *arguments.set]), arguments
    except ConfigError as error:
        parser.exit(1, f"services.launch: {error}\n")
