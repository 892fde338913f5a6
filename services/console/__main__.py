"""The command `twostroke`, in a checkout `python -m services.console`: one door to the programs of this package.

Every command is an existing program, imported when it is asked for: `--help` imports nothing that takes time. In an
installed package this file is `twostroke.services.console.__main__`; its first act is to let Python find `services`.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]  # has services/, bench/ and deploy/, in a checkout and in an installed package
HELP = """usage: twostroke COMMAND [OPTIONS]

An LLM server whose engine has two strokes, in two processes.

commands:
  serve [MODEL]  start a server; MODEL is a directory or a name at Hugging Face,
                 such as Qwen/Qwen3-0.6B, else a small model of the package
  chat           send one prompt to a running server, or talk to it
  bench          send load to a running server; latencies and throughput
  ctl            ask or change the server of this machine: status, replace-dense
  models         list the models here; pull or rm one by its name
  build-engines  build the TensorRT plans of a model before a start
  completion     print a script by which a shell completes all this
  doctor         say whether this machine can serve, with the options of serve

options:
  -h, --help     show this text; after a COMMAND, its options
  --version      show the version

first steps, in two terminals:
  twostroke serve    # OpenAI's API and a page at http://127.0.0.1:8080/
  twostroke chat --prompt "San Francisco is a" --max-tokens 32
"""
USAGE_ERROR = 2
BROKEN_PIPE_STATUS = 141  # as shells report SIGPIPE


def main() -> None:
    """Runs the command of the command line and ends the process with its exit status."""
    _find_services()
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output that is still buffered
        status = BROKEN_PIPE_STATUS
    sys.exit(status)


def run(argv: list[str]) -> int:
    """Runs a command; `argv` without the name of the program. Returns the exit status."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if argv else USAGE_ERROR
    name, rest = argv[0], argv[1:]
    if name == "--version":
        from services import VERSION

        print(f"twostroke {VERSION}")
        return 0
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(COMMANDS)}"
        print(f"twostroke: {name!r} is not a command: {hint}", file=sys.stderr)
        return USAGE_ERROR
    return COMMANDS[name](rest, f"twostroke {name}")


def _serve(argv: list[str], program: str) -> int:
    from services.launch.__main__ import serve_all

    serve_all(argv, program, "twostroke chat")
    return 0


def _chat(argv: list[str], program: str) -> int:
    from services.gateway import chat_client

    return chat_client.main(argv, program)


def _bench(argv: list[str], program: str) -> int:
    from bench import serving

    return serving.main(argv, program)


def _ctl(argv: list[str], program: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below shows no traceback
    from services.launch import ctl

    return ctl.main(argv, program)


def _doctor(argv: list[str], program: str) -> int:
    from services.console import doctor

    return doctor.main(argv, program)


def _models(argv: list[str], program: str) -> int:
    from services.console import models

    return models.main(argv, program)


def _build_engines(argv: list[str], program: str) -> int:
    from services.common.cli import dashed
    from services.dense_worker.tensorrt.build_options import make_parser

    # Without torch, whose import takes seconds: --help, and what is wrong.
    make_parser(program).parse_args(dashed(argv))
    from services.dense_worker.tensorrt import build

    return build.main(argv, program)


def _completion(argv: list[str], program: str) -> int:
    from services.console import completion

    return completion.main(argv, program)


COMMANDS = {
    "serve": _serve,
    "chat": _chat,
    "bench": _bench,
    "ctl": _ctl,
    "models": _models,
    "build-engines": _build_engines,
    "completion": _completion,
    "doctor": _doctor,
}


def _find_services() -> None:
    """Lets this process and its children import the packages below `ROOT`, whatever else has their names.

    Python would look for a child's modules first in the working directory, where a user may have a folder `services`.
    """
    sys.path.insert(0, str(ROOT))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


if __name__ == "__main__":
    main()
