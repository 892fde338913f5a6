"""What a person sees who starts the launcher in a terminal: short lines, a bar, and the answer on a line of its own."""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest
from safetensors import safe_open

from services.common.config import EMBEDDED_MODEL
from tests.support.cluster import NO_STANDBYS, START_TIMEOUT_S, STOP_TIMEOUT_S, free_port
from tests.support.terminal import Terminal, terminal
from tests.support.warm_process import WarmProcess, run_warm, warm_server

NUM_COLUMNS = 100
ANSWER = " city in Northern California that is known for its steep hills, its cable cars and the fog that rolls in"
LOG_LINE = re.compile(r"\d\d:\d\d:\d\d (launch|gateway|dense_worker|attn_worker) ")
COMMAND = [sys.executable, "-m", "services.launch", "--max-tokens", "40"]
COMMAND += [argument for override in NO_STANDBYS for argument in ("--set", override)]


@contextlib.contextmanager
def launched(screen: Terminal, *flags: str) -> Iterator[str]:
    """A launcher whose output goes to the terminal, and the address of its HTTP server. It must end with status 0."""
    http = f"127.0.0.1:{free_port()}"
    addresses = ["--set", f"gateway.http_address={http}", "--set", f"gateway.address=127.0.0.1:{free_port()}"]
    command = [*COMMAND, "--sample-prompt", "San Francisco is a", *addresses, *flags]
    process = WarmProcess(warm_server(), command, stdout=screen.file, stderr=screen.file)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not any("Stop with Ctrl-C" in line for line in screen.lines()):
            assert process.poll() is None and time.monotonic() < deadline, "\n".join(screen.lines())
            time.sleep(0.05)
        yield http
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_TIMEOUT_S) == 0
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)


def num_parameters() -> int:
    """Of the embedded model, whose head is its embedding."""
    with safe_open(EMBEDDED_MODEL / "model.safetensors", "np") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def complete(http: str) -> None:
    body = json.dumps({"prompt": "San Francisco is a", "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"http://{http}/v1/completions", data=body, headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4


def test_a_terminal_shows_short_lines_a_bar_and_the_answer_on_a_line_of_its_own() -> None:
    with terminal(NUM_COLUMNS) as screen:
        with launched(screen) as http:
            complete(http)
        lines = screen.lines()
    [answer] = [line for line in lines if line.startswith(ANSWER[:20])]
    assert answer.startswith(ANSWER) and not LOG_LINE.search(answer)
    before, after = lines[: lines.index(answer)], lines[lines.index(answer) + 1 :]
    [bar] = [line for line in before if line.startswith("loading tiny-llama: 100%")]
    num_bytes = 4 * num_parameters() / 1e6
    assert f"{num_bytes:.1f}MB/{num_bytes:.1f}MB" in bar and "B/s" in bar, bar
    for line in before:
        assert line == bar or LOG_LINE.match(line), line
        assert len(line) <= NUM_COLUMNS, line
    serving = next(i for i, line in enumerate(after) if line.startswith("Serving tiny-llama"))
    others = [line for line in after[:serving] if line and not LOG_LINE.match(line)]
    table = dict(line.split(maxsplit=1) for line in others if not line.startswith("  KV cache"))
    table["KV cache"] = next(line for line in others if line.startswith("  KV cache")).split(maxsplit=2)[2]
    assert len(table) == len(others), others
    assert table["HTTP"] == http and table["device"] == "cpu, float32, torch"
    assert table["KV cache"].startswith("65,536 tokens, up to ") and "prefix cache" in table["on"]
    assert not any("timestamp=" in line or "request ended" in line for line in lines), "a log line of a request"


def test_a_log_line_for_each_answer_is_written_only_if_asked_for() -> None:
    with terminal(NUM_COLUMNS) as screen:
        with launched(screen, "--access-log") as http:
            complete(http)
        ends = [line for line in screen.lines() if "request ended" in line]
    assert len(ends) == 2, "of the sample prompt and of the completion"


@pytest.mark.parametrize(("flags", "num_ends"), [((), 0), (("--access-log",), 1), (("--set", "log.level=debug"), 1)])
def test_without_a_terminal_lines_are_logfmt_and_nothing_else_is_written(flags: tuple[str, ...], num_ends: int) -> None:
    result = run_warm(*COMMAND[2:], "--prompt", "San Francisco is a", *flags)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(ANSWER) and result.stdout.count("\n") == 1
    lines = result.stderr.splitlines()
    assert all(re.match(r"timestamp=\S+ level=\w+ service=\w+ event=", line) for line in lines), result.stderr
    assert sum('event="request ended"' in line for line in lines) == num_ends
