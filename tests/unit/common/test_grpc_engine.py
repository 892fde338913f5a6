"""gRPC's event engine and its handlers of forks are off in all services."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import services.common.process as process
switch_off = process.set_up_grpc
def note():
    assert "grpc" not in sys.modules, "gRPC has read the environment already"
    switch_off()
    print("off", os.environ["GRPC_EXPERIMENTS"])
import os
process.set_up_grpc = note
import {module}.__main__
import grpc
grpc.insecure_channel("unix:/nowhere").close()
"""


def import_service(module: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_EXPERIMENTS"} | env
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)


@pytest.mark.parametrize("name", ["gateway", "dense_worker", "dense_worker.ranks", "attn_worker"])
def test_a_service_switches_it_off_before_it_imports_grpc_which_knows_the_names(name: str) -> None:
    result = import_service(f"services.{name}", {})
    assert result.stdout.startswith("off -")
    assert "experiment" not in result.stderr  # of an unknown one gRPC would tell


def test_what_the_user_has_set_stays() -> None:
    assert import_service("services.gateway", {"GRPC_EXPERIMENTS": "call_v3"}).stdout == "off call_v3\n"


FORK = """
import services.common.process as process
process.set_up_grpc()
import grpc, os, time
from concurrent.futures import ThreadPoolExecutor
server = grpc.server(ThreadPoolExecutor(1))
server.add_insecure_port(f"unix:{directory}/server.sock")
server.start()
with grpc.insecure_channel(f"unix:{directory}/server.sock") as channel:
    grpc.channel_ready_future(channel).result(30)
    own = len(os.listdir("/proc/self/task"))
    pid = os.fork()
    if not pid:
        time.sleep(0.2)  # in which handlers would start threads
        os._exit(len(os.listdir("/proc/self/task")))
    print(own > 1, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
os._exit(0)
"""


def test_a_forked_process_has_no_threads_of_grpc(tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"directory = {str(tmp_path)!r}\n{FORK}"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "True 1\n"
