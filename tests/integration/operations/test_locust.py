"""The locustfile under the real locust, headless, against a real gateway whose worker has a known pace."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gateway import TOKEN_IDS, running_gateway
from bench.load.options import REPOSITORY
from bench.load.stub_dense import StubSettings, running_stub

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("locust") is None, reason="locust is not installed, see requirements-bench.txt"
)
PACE_S = 0.02
MAX_TOKENS = 15
TIMEOUT_S = 90
RUN_S = 60  # at most, see `--until-requests`


def run_locust(*options: str) -> subprocess.CompletedProcess[str]:
    files = "bench/locustfile.py,tests/support/clients/locust_until.py"
    command = [sys.executable, "-m", "locust", "-f", files, "--headless", "--json", "-t", f"{RUN_S}s", *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_users_stream_over_http_and_grpc_and_report_first_tokens_and_rates(tmp_path: Path) -> None:
    settings = StubSettings(f"unix:{tmp_path}/dense.sock", tmp_path / "receipts.sock", TOKEN_IDS, PACE_S, 1)
    arguments = argparse.Namespace(set=[], sockets="tcp")
    with running_stub(settings) as stub, running_gateway(tmp_path, arguments) as gateway:
        http, grpc = gateway.addresses["sse"], gateway.addresses["grpc"]
        load = ["-u", "4", "-r", "4", "--until-requests", "10", "--stop-timeout", "20", "--think-s", "0.1"]
        where = ["--host", f"http://{http}", "--grpc-address", grpc, "--max-tokens", str(MAX_TOKENS)]
        result = run_locust(*load, *where)
        num_steps = len(stub.report().step_ns)
    assert result.returncode == 0, result.stderr
    rows = {(row["method"], row["name"]): row for row in json.loads(result.stdout)}
    assert {
        ("POST", "/v1/completions"), ("HTTP", "TTFT"), ("HTTP", "tokens/s"),
        ("gRPC", "GenerateStream"), ("gRPC", "TTFT"), ("gRPC", "tokens/s"),
    } == set(rows)  # fmt: skip
    assert all(row["num_failures"] == 0 and row["num_requests"] > 0 for row in rows.values())
    for protocol, request in (("HTTP", ("POST", "/v1/completions")), ("gRPC", ("gRPC", "GenerateStream"))):
        assert rows[protocol, "TTFT"]["num_requests"] == rows[request]["num_requests"]
        # Tokens that a busy machine has delayed come faster than the worker makes them, but not in every answer.
        slowest_rate = rows[protocol, "tokens/s"]["min_response_time"]
        assert 0 < slowest_rate < 1.3 / PACE_S, "tokens came faster than the worker makes them"
    num_answers = rows["POST", "/v1/completions"]["num_requests"] + rows["gRPC", "GenerateStream"]["num_requests"]
    assert num_steps >= MAX_TOKENS, "too few steps: the answers came from elsewhere"
    assert num_answers * MAX_TOKENS <= 4 * num_steps, "more than one token per user and step"


def test_a_missing_server_shows_as_failures_and_in_the_exit_status() -> None:
    result = run_locust(
        "-u", "2", "-r", "2", "--until-requests", "1", "--host", "http://127.0.0.1:9", "--grpc-address", "127.0.0.1:9"
    )
    assert result.returncode == 1
    rows = {(row["method"], row["name"]): row for row in json.loads(result.stdout)}
    assert set(rows) == {("POST", "/v1/completions"), ("gRPC", "GenerateStream")}
    assert all(row["num_failures"] == row["num_requests"] > 0 for row in rows.values())
