"""`twostroke completion`: a script by which a shell completes commands, options and values, made from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

SHELLS = ("bash", "zsh", "fish")
HELP = """Prints a script for a shell. To have it in each new one:

  bash:  twostroke completion bash > ~/.local/share/bash-completion/completions/twostroke
  zsh:   twostroke completion zsh > a directory of $fpath, in a file _twostroke
  fish:  twostroke completion fish > ~/.config/fish/completions/twostroke.fish
"""


def main(argv: Sequence[str], program: str = "twostroke completion") -> int:
    """Prints the script. Returns the exit status."""
    shell = make_parser(program).parse_args(argv).shell
    import shtab

    print(shtab.complete(whole_parser(), shell))
    return 0


def make_parser(program: str) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=program, description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """All commands as one parser, which nothing parses with. Directories and files are completed as such."""
    import shtab

    from bench import serving
    from services.console import models
    from services.dense_worker.tensorrt import build_options
    from services.gateway import chat_client
    from services.launch import arguments, ctl

    about = {
        "serve": (arguments, "start a server"),
        "chat": (chat_client, "send one prompt, or talk"),
        "bench": (serving, "send load to a running server"),
        "ctl": (ctl, "ask or change the server of this machine"),
        "models": (models, "list, pull or remove models"),
        "build-engines": (build_options, "build the TensorRT plans of a model"),
        "doctor": (arguments, "say whether this machine can serve"),
    }
    parser = argparse.ArgumentParser(prog="twostroke")
    parser.add_argument("--version", action="store_true", help="show the version")
    commands = parser.add_subparsers()
    for name, (module, text) in about.items():
        program = f"twostroke {name}"
        commands.add_parser(name, prog=program, help=text, parents=[module.make_parser(program)], add_help=False)
    name = "completion"
    commands.add_parser(name, help="print a script for a shell", parents=[make_parser(name)], add_help=False)
    _complete_values(parser, {**dict.fromkeys(("DIR", "MODEL", "OUT", "PLANS"), shtab.DIRECTORY), "FILE": shtab.FILE})
    return parser


def _complete_values(parser: argparse.ArgumentParser, paths: dict[str, dict[str, str]]) -> None:
    """`paths`: how to complete what has such a name in the usage. There, `{a,b}` are the only values."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_values(each, paths)
        elif isinstance(action.metavar, str) and action.metavar in paths:
            action.complete = paths[action.metavar]  # type: ignore[attr-defined]
        elif isinstance(action.metavar, str) and action.metavar.startswith("{"):
            action.choices = action.metavar[1:-1].split(",")
