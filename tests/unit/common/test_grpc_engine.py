"""gRPC's event engine is off in all services."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import services.common.process as process
switch_off = process.switch_off_grpc_engine
def note():
    assert "grpc" not in sys.modules, "gRPC has read the environment already"
    switch_off()
    print("off", os.environ["GRPC_EXPERIMENTS"])
import os
process.switch_off_grpc_engine = note
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
