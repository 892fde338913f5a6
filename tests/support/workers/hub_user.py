"""A user of a Hugging Face Hub, forked from `tests.support.warm_server`, whose settings are in its environment.

`python -m tests.support.workers.hub_user path ARGUMENTS...` prints path and name of the model that a launcher with
these arguments serves, `models CALLS` runs `twostroke models` for each list of arguments in a JSON list and prints the
statuses, and any other first argument is a module to run.
"""

from __future__ import annotations

import json
import runpy
import sys

from services.console import models
from services.launch.arguments import parse_args


def main() -> None:
    forget_hub()
    what, *arguments = sys.argv[1:]
    if what == "path":
        model = parse_args(arguments)[0].model
        print(model.path)
        print(model.name)
    elif what == "models":
        for call in json.loads(arguments[0]):
            print("status", models.main(call), flush=True)
    else:
        sys.argv = [what, *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)


def forget_hub() -> None:
    """Lets `huggingface_hub` be imported anew: it reads the environment once, and the warm server has imported it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]


if __name__ == "__main__":
    main()
