"""The command line that all services share: `--config FILE` and `--set section.key=value`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from services.common.child_options import ChildOptions
from services.common.config import Config, load_config
from services.common.errors import ConfigError
from services.common.lifeline import move_up
from services.common.process import die_with_parent


def parse_service_args(prog: str, argv: Sequence[str]) -> tuple[Config, ChildOptions]:
    """The config of `python -m PROG ARGV...`, and the launcher's options for it.

    An invalid config ends the process with an error line and status 1.
    """
    parser = argparse.ArgumentParser(prog=prog)
    add_config_arguments(parser)
    parser.add_argument(
        "--child",
        type=ChildOptions.model_validate_json,
        default=ChildOptions(),
        metavar="JSON",
        help="what the launcher tells its children",
    )
    arguments = parser.parse_args(dashed(argv))
    options: ChildOptions = arguments.child
    if options.launcher_pid is not None:
        die_with_parent(options.launcher_pid)
    if options.lifeline is not None:
        options = options.model_copy(update={"lifeline": move_up(options.lifeline)})
    try:
        return load_config(arguments.config, arguments.set), options
    except ConfigError as error:
        parser.exit(1, f"{prog}: {error}\n")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--config` (a `Path` or None) and `--set` (a list of overrides)."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; default: built-in values")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="overrides one value of the file; may be given several times, the last one wins",
    )


def dashed(argv: Sequence[str]) -> list[str]:
    """Replaces underscores in the names of long flags by dashes: `--max_tokens=5` means `--max-tokens=5`."""
    return [_dash(argument) if argument.startswith("--") else argument for argument in argv]


def _dash(argument: str) -> str:
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value
