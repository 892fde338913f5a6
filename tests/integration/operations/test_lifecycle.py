"""Starting and stopping: the two commands of the README, services without a launcher, and bad starts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import grpc
import pytest

from services.channel.region import SHM_DIR
from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2_grpc
from tests.support.cluster import (
    NO_STANDBYS,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    children_of,
    free_port,
    is_alive,
    request,
    running_cluster,
    wait_for_log,
)
from tests.support.models import TWO_LAYERS
from tests.support.warm_process import WarmProcess, run_warm, warm_server

MAX_ROUNDS = 5  # on a busy machine a stream may end before the signal comes, or all take longer


def test_stdout_has_nothing_but_the_answer() -> None:
    result = run_warm("services.launch", "--prompt", "San Francisco is a", "--max_tokens", "7")
    assert result.returncode == 0, result.stderr
    assert result.stdout == " city in Northern California that is known\n"


def test_the_chat_client_streams_from_a_running_gateway_and_stops_early(tmp_path: Path) -> None:
    with running_cluster(tmp_path, is_warm=True) as cluster:
        address = f"unix:{tmp_path}/gateway.sock"
        client = ("services.gateway.chat_client", "--address", address)
        answer = run_warm(*client, "--prompt", "San Francisco is a", "--max_tokens=7")
        assert (answer.returncode, answer.stdout) == (0, " city in Northern California that is known\n")
        stopped = run_warm(*client, "--prompt", "Count", "--max-tokens", "1900", "--stop-after-ms", "300")
        assert stopped.returncode == 0, stopped.stderr
        cluster.wait_idle()


def test_ctrl_c_in_the_middle_of_a_stream_stops_everything_within_five_seconds(tmp_path: Path) -> None:
    """docs/operations.md promises this bound. A busy machine may take longer, but not each time."""

    def stop_s() -> float | None:
        """How long it took; None if the stream had ended before."""
        with running_cluster(tmp_path, is_warm=True) as cluster:
            stream = cluster.gateway.GenerateStream(request("Count", 1900, ignore_eos=True))
            next(stream)
            start = time.monotonic()
            cluster.process.send_signal(signal.SIGINT)
            assert cluster.process.wait(STOP_TIMEOUT_S) == 0
            duration_s = time.monotonic() - start
            assert "level=warning" not in cluster.log_file.read_text()
            with contextlib.suppress(grpc.RpcError):
                list(stream)
                return None
        return duration_s

    durations_s = (stop_s() for _ in range(MAX_ROUNDS))
    assert any(duration_s is not None and duration_s < 5.0 for duration_s in durations_s)


def test_the_services_end_with_a_killed_launcher(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "services.launch"]
    sockets = (f"gateway.address=unix:{tmp_path}/gateway.sock", f"gateway.http_address=unix:{tmp_path}/http.sock")
    for override in (*NO_STANDBYS, *sockets):
        command += ["--set", override]
    with log.open("w") as stderr:
        process = WarmProcess(warm_server(), command, stderr=stderr.fileno())
    wait_for_log(process, log, "Serving ")
    children = children_of(process.pid)
    assert len(children) == 3
    process.kill()
    process.wait()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while any(is_alive(child) for child in children):
        assert time.monotonic() < deadline, "a service outlived its launcher"
        time.sleep(0.05)


def test_services_start_without_a_launcher_in_any_order(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    processes = []
    try:
        for role in ("gateway", "dense_worker", "attn_worker"):  # each before the service that it needs
            command = [sys.executable, "-m", f"services.{role}", "--config", str(config)]
            with (tmp_path / role).open("w") as stderr:
                processes.append(WarmProcess(warm_server(), command, stderr=stderr.fileno()))
            time.sleep(0.5)
        wait_for_log(processes[0], tmp_path / "gateway", "event=serving")
        with grpc.insecure_channel(f"unix:{tmp_path}/gateway.sock") as channel:
            answer = gateway_pb2_grpc.GatewayStub(channel).Generate(request("San Francisco is a", 7))
        assert answer.completions[0].text == " city in Northern California that is known"
    finally:
        for process in processes:
            process.terminate()
    assert [process.wait(STOP_TIMEOUT_S) for process in processes] == [0, 0, 0]


@pytest.mark.parametrize(("role", "peer"), [("gateway", "dense worker"), ("dense_worker", "attention worker")])
def test_a_peer_that_never_comes_is_named_with_the_deadline(tmp_path: Path, role: str, peer: str) -> None:
    config = write_config(tmp_path)
    result = run_warm(f"services.{role}", "--config", str(config), "--set", "peers.connect_timeout_s=1.5")
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert peer in error and "1.5 s" in error and str(tmp_path) in error


@pytest.mark.parametrize("role", ["gateway", "dense", "attention"])
def test_a_port_in_use_is_named(tmp_path: Path, role: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run_warm("services.launch", "--prompt", "a", "--set", f"{role}.address={address}")
    assert result.returncode == 1
    assert f"{role}.address {address}: port in use" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "/nowhere/model"), ("/nowhere/model", "neither a directory")),
        (("--set", "scheduler.max_num_seq=3"), ("unknown config key", "scheduler.max_num_seq")),
        (("--set", "scheduler.max_num_seqs=0"), ("max_num_seqs", "greater than or equal to 1")),
        (("--set", "scheduler.max_num_seqs=4096"), ("4096", "512")),
        (("--set", "model.dtype=int3"), ("int3", "bfloat16")),
        (("--config", "/nowhere/config.toml"), ("/nowhere/config.toml",)),
        (("--num-layers", "99"), ("num_layers is 99", "1 to 4")),
        (("--set", "model.max_model_len=4096"), ("4096", "2048")),
        (("--set", "attention.kv_cache_bytes=100"), ("100", "block")),
        (("--set", "dense.device=cuda"), ("cuda",)),
    ],
)
def test_an_impossible_configuration_is_refused_by_name(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    if arguments[-1] == "dense.device=cuda":
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    result = run_warm("services.launch", "--prompt", "a", *arguments)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_damaged_models_are_refused_by_name(tmp_path: Path) -> None:
    truncated = shutil.copytree(EMBEDDED_MODEL, tmp_path / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    mismatched = shutil.copytree(EMBEDDED_MODEL, tmp_path / "mismatched")
    config = json.loads((mismatched / "config.json").read_text())
    (mismatched / "config.json").write_text(json.dumps(config | {"intermediate_size": 700}))
    empty = shutil.copytree(EMBEDDED_MODEL, tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    for path, word in ((truncated, "model.safetensors"), (mismatched, "700"), (empty, "safetensors")):
        result = run_warm("services.launch", "--prompt", "a", "--model", str(path))
        assert result.returncode == 1
        assert str(path) in result.stderr and word in result.stderr and "Traceback" not in result.stderr


def test_random_weights_need_only_a_config(tmp_path: Path) -> None:
    shutil.copy(EMBEDDED_MODEL / "config.json", tmp_path)
    (tmp_path / "sockets").mkdir()
    settings = (f"model.path={tmp_path}", "model.load_format=dummy", "model.num_layers=2")
    with running_cluster(tmp_path / "sockets", *settings, is_warm=True) as cluster:
        assert len(cluster.generate([5, 6, 7], 9, ignore_eos=True).token_ids) == 9


def test_too_little_memory_is_an_error_that_says_how_much(tmp_path: Path) -> None:
    """The largest step needs more, in the dense worker and for what the workers exchange, than there is."""
    space = os.statvfs(SHM_DIR)
    too_many = space.f_blocks * space.f_frsize // (512 * 4) + 1  # rows of the embedded model's qkv
    result = run_warm("services.launch", "--prompt", "a", "--set", f"scheduler.max_num_batched_tokens={too_many}")
    assert result.returncode == 1
    fitting = re.search(r"memory has \d+ bytes free, .*: set scheduler.max_num_batched_tokens to (\d+)", result.stderr)
    assert int(fitting[1]) < too_many


def test_a_killed_worker_is_replaced_and_the_stream_goes_on(tmp_path: Path) -> None:
    options = {"ignore_eos": True, "temperature": 0.8, "seed": 5}
    with running_cluster(tmp_path, TWO_LAYERS, f"launch.max_restarts={2 * MAX_ROUNDS}", is_warm=True) as cluster:
        expected = cluster.generate("Count from 1", 150, **options).token_ids

        def resubmits_after_a_kill(role: str) -> bool:
            """Kills a worker under a stream. Returns whether that was in the middle: the stream may end before."""
            pid, num_resubmitted = cluster.pid_of(role), cluster.log_file.read_text().count("num_resubmitted=1")
            stream = cluster.gateway.GenerateStream(request("Count from 1", 150, **options))
            token_ids = list(next(stream).token_ids)
            os.kill(pid, signal.SIGKILL)
            for chunk in stream:
                token_ids += chunk.token_ids
            assert token_ids == expected
            cluster.wait_idle(START_TIMEOUT_S)
            return cluster.log_file.read_text().count("num_resubmitted=1") > num_resubmitted

        for role in ("dense_worker", "attn_worker"):
            assert any(resubmits_after_a_kill(role) for _ in range(MAX_ROUNDS)), "no stream was open at a kill"


def test_a_worker_killed_without_open_streams_is_replaced(tmp_path: Path) -> None:
    with running_cluster(tmp_path, is_warm=True) as cluster:
        expected = cluster.generate("Count from 1", 20, ignore_eos=True).token_ids
        for role in ("dense_worker", "attn_worker"):
            pid = cluster.pid_of(role)
            cluster.wait_idle()
            os.kill(pid, signal.SIGKILL)
            cluster.wait_idle(START_TIMEOUT_S)
            assert cluster.generate("Count from 1", 20, ignore_eos=True).token_ids == expected
            assert cluster.pid_of(role) != pid


def write_config(directory: Path) -> Path:
    config = directory / "config.toml"
    sections = (f'[{name}]\naddress = "unix:{directory}/{name}.sock"\n' for name in ("attention", "dense", "gateway"))
    config.write_text("".join(sections) + f'http_address = "unix:{directory}/http.sock"\n')
    return config


def test_a_second_cluster_on_a_taken_port_ends_at_once(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with running_cluster(tmp_path, f"gateway.address={address}", is_warm=True):
        second = run_warm("services.launch", "--sample-prompt", "a", "--set", f"gateway.address={address}")
    assert second.returncode == 1 and second.stdout == ""
    assert "port in use" in second.stderr and "restarting" not in second.stderr


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_serves_too(dtype: str) -> None:
    result = run_warm(
        "services.launch", "--prompt", "San Francisco is a", "--max-tokens", "7", "--set", f"model.dtype={dtype}"
    )
    assert result.stdout == " city in Northern California that is known\n"
