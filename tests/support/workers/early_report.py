"""A process that is started before its command line is known: `FILE --child LIFELINE`; it writes there what it got."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from services.common.early_start import await_arguments
from services.common.lifeline import Lifeline, move_up

if __name__ == "__main__":
    await_arguments("json")
    environment = {name: value for name, value in os.environ.items() if name.startswith("TWOSTROKE_TEST_")}
    Path(sys.argv[1]).write_text(json.dumps({"argv": sys.argv[1:], "environment": environment}))
    Lifeline(move_up(int(sys.argv[3]))).keep(["a"])
