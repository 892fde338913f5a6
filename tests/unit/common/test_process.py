"""How a process ends with the one that started it."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import os, sys, time
from services.common.cli import parse_service_args
parent = int(sys.argv[1])
while os.getppid() == parent:
    time.sleep(0.01)
parse_service_args("child", ["--die-with-parent", sys.argv[1]])
print("goes on")
"""
PARENT = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}, str(os.getpid())])"


def test_a_process_whose_parent_ended_before_it_could_ask_ends_too() -> None:
    result = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert result.stdout == "" and "KeyboardInterrupt" in result.stderr
