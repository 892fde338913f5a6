"""Two attention workers give the tokens of one, also when either of them, or the dense worker, dies under streams."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.pb import gateway_pb2, sampling_pb2
from tests.deploy.kustomize import rendered
from tests.support.clients.streams import Collected, collect, collect_all, messages_of_every_kind
from tests.support.cluster import Cluster, ctl, request, running_cluster, wait_for_log
from tests.support.rank_processes import pid_of
from tests.support.warm_process import WarmProcess, run_warm, warm_server

pytestmark = pytest.mark.timeout(400)  # processes start and stop several times, and the machine may be slow

PROMPT = "Count from 1 to 500, slowly, and tell of every number what you like about it. " * 3
MAX_TOKENS = 40
PROCESSES = ("dense_worker", "attn_worker", "attn_worker-1")
KILLED = ("attn_worker-1",)  # in the short run; `make chaos` kills each


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_long = metafunc.config.getoption("--all-families")
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", PROCESSES if is_long else KILLED)
    if "killed_in_drain" in metafunc.fixturenames:
        metafunc.parametrize("killed_in_drain", (*PROCESSES, "attn_worker-2") if is_long else ("dense_worker",))
    if "stopped" in metafunc.fixturenames:
        metafunc.parametrize("stopped", PROCESSES[1:] if is_long else ())


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("workers")
    tier = f"attention.host_kv_bytes={2**25}"  # of each worker, which may read its blocks from there after a death
    with running_cluster(directory, "attention.workers=2", tier, is_warm=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def messages(cluster: Cluster) -> list[gateway_pb2.GenerateRequest]:
    text = collect(cluster.gateway, request(PROMPT, MAX_TOKENS, ignore_eos=True)).text[0]
    return messages_of_every_kind(PROMPT, MAX_TOKENS, stop=text[-12:])


@pytest.fixture(scope="module")
def of_one_worker(cluster: Cluster, messages: list[gateway_pb2.GenerateRequest]) -> list[Collected]:
    return collect_all(cluster.gateway, messages)


def test_streams_are_those_of_one_worker(
    workers: Cluster, messages: list[gateway_pb2.GenerateRequest], of_one_worker: list[Collected]
) -> None:
    for collected, expected in zip(collect_all(workers.gateway, messages), of_one_worker, strict=True):
        collected.assert_equals(expected)
    workers.wait_idle()


def test_searches_are_those_of_one_worker(workers: Cluster, cluster: Cluster) -> None:
    pid, search = pid_of(workers, "dense_worker"), sampling_pb2.BeamSearch(length_penalty=1.0)
    messages = [request(each, 12, best_of=3, n=3, beam_search=search) for each in ("San Francisco is a", "A city is")]
    pairs = zip(collect_all(workers.gateway, messages), collect_all(cluster.gateway, messages), strict=True)
    for collected, expected in pairs:
        collected.assert_equals(expected)
    assert pid_of(workers, "dense_worker") == pid, "it has not died of them"
    workers.wait_idle()


def test_workers_come_and_go_under_streams(
    workers: Cluster, messages: list[gateway_pb2.GenerateRequest], of_one_worker: list[Collected]
) -> None:
    added = ctl(workers, "add-attention")
    found = re.fullmatch(r"added (attn_worker-\d+), process \d+\n", added.stdout)
    assert found is not None, added.stderr
    name = found[1]

    num_sequences = list[int]()

    def drain_twice() -> None:
        """Two at once, while a client goes away whose stream would move, too."""
        longer = [request(f"{each}. {PROMPT}", 1000, ignore_eos=True) for each in "ABCD"]
        streams = [workers.gateway.GenerateStream(each) for each in longer]
        for stream in streams:
            next(iter(stream))
        num_sequences[:] = [each.num_sequences for each in workers.dense_status().attention_workers]
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(ctl, workers, "drain-attention", name) for _ in range(2)]
            streams[0].cancel()
            drained, second = sorted((call.result() for call in calls), key=lambda each: each.returncode)
        for stream in streams:
            stream.cancel()
        assert drained.stdout == f"{name} has no sequence any more, and has been stopped\n", drained.stderr
        assert f"there is no attention worker '{name}'" in second.stderr

    disturbed = collect_all(workers.gateway, messages, drain_twice)
    for collected, expected in zip(disturbed, of_one_worker, strict=True):
        collected.assert_equals(expected)
    assert len(num_sequences) == 3 and num_sequences[2] > 0
    assert workers.num_copied_tokens() > 0
    assert len(workers.dense_status().attention_workers) == 2
    refused = ctl(workers, "drain-attention", name)
    assert f"there is no attention worker '{name}'; there are attn_worker, attn_worker-1" in refused.stderr
    workers.wait_idle()


def test_several_changes_at_once_beside_a_kill_change_no_token(
    workers: Cluster, messages: list[gateway_pb2.GenerateRequest], of_one_worker: list[Collected]
) -> None:
    leaves = ctl(workers, "add-attention").stdout.split()[1].rstrip(",")
    changes = [("add-attention",)] * 3 + [("drain-attention", each) for each in (leaves, "attn_worker")]
    answers = dict[tuple[str, ...], list[str]]()

    def change() -> None:
        with ThreadPoolExecutor(len(changes)) as threads:
            calls = [threads.submit(ctl, workers, *each) for each in changes]
            os.kill(pid_of(workers, "attn_worker"), signal.SIGKILL)
            for each, call in zip(changes, calls, strict=True):
                answers.setdefault(each, []).append(call.result().stdout + call.result().stderr)

    for collected, expected in zip(collect_all(workers.gateway, messages, change), of_one_worker, strict=True):
        collected.assert_equals(expected)
    added = [re.fullmatch(r"added (attn_worker-\d+), process \d+\n", each) for each in answers["add-attention",]]
    assert all(added), answers
    assert "attn_worker stays as long as the launcher" in answers["drain-attention", "attn_worker"][0]
    assert "has no sequence any more, and has been stopped" in answers["drain-attention", leaves][0]
    workers.wait_idle()
    for name in [each[1] for each in added if each is not None]:
        assert ctl(workers, "drain-attention", name).returncode == 0
    deadline = time.monotonic() + 60.0
    while len(workers.dense_status().attention_workers) != 2:  # one that was killed comes back
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_that_dies_in_a_drain_changes_no_token(
    workers: Cluster,
    messages: list[gateway_pb2.GenerateRequest],
    of_one_worker: list[Collected],
    killed_in_drain: str,
) -> None:
    added = ctl(workers, "add-attention")
    name = added.stdout.split()[1].rstrip(",")
    pid = pid_of(workers, name if killed_in_drain == "attn_worker-2" else killed_in_drain)

    def num_sequences() -> int:
        [*_, last] = workers.dense_status().attention_workers
        return last.num_sequences

    def drain_and_kill() -> None:
        before = num_sequences()
        assert before > 1
        with ThreadPoolExecutor(1) as threads:
            draining = threads.submit(ctl, workers, "drain-attention", name)
            while num_sequences() == before and not draining.done():
                time.sleep(0.002)
            os.kill(pid, signal.SIGKILL)
            drained = draining.result()
        assert drained.stdout == f"{name} has no sequence any more, and has been stopped\n", drained.stderr

    disturbed = collect_all(workers.gateway, messages, drain_and_kill)
    for collected, expected in zip(disturbed, of_one_worker, strict=True):
        collected.assert_equals(expected)
    workers.wait_idle()
    deadline = time.monotonic() + 60.0
    while len(workers.dense_status().attention_workers) != 2:  # one that was killed comes back
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_streams_end_as_without_the_kill(
    workers: Cluster, messages: list[gateway_pb2.GenerateRequest], of_one_worker: list[Collected], name: str
) -> None:
    pids = {each: pid_of(workers, each) for each in PROCESSES}
    disturbed = collect_all(workers.gateway, messages, lambda: os.kill(pids[name], signal.SIGKILL))
    for collected, expected in zip(disturbed, of_one_worker, strict=True):
        collected.assert_equals(expected)
    changed = {each for each in PROCESSES if pid_of(workers, each) != pids[each]}
    assert changed == {name}, f"{changed}: the other processes live on"
    workers.wait_idle()


def test_a_worker_that_hangs_is_found(
    tmp_path: Path, messages: list[gateway_pb2.GenerateRequest], of_one_worker: list[Collected], stopped: str
) -> None:
    settings = "attention.workers=2", "watchdog.stall_timeout_s=5"
    with running_cluster(tmp_path, *settings, is_warm=True) as cluster:
        pid = pid_of(cluster, stopped)
        disturbed = collect_all(cluster.gateway, messages, lambda: os.kill(pid, signal.SIGSTOP))
        for collected, expected in zip(disturbed, of_one_worker, strict=True):
            collected.assert_equals(expected)
        assert pid_of(cluster, stopped) != pid
        cluster.wait_idle()


@contextlib.contextmanager
def attention_worker(directory: Path, name: str) -> Iterator[WarmProcess]:
    """A worker without a launcher, as in a container of its own."""
    command = [sys.executable, "-m", "services.attn_worker", "--set", f"attention.address=unix:{directory}/{name}.sock"]
    with (directory / f"{name}.log").open("w") as log:
        process = WarmProcess(warm_server(), command, stderr=log.fileno())
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(30.0)


def test_workers_at_sockets_of_a_pattern_are_found_as_they_come(
    tmp_path: Path, cluster: Cluster, messages: list[gateway_pb2.GenerateRequest], of_one_worker: list[Collected]
) -> None:
    services = 'launch.services=["dense_worker", "gateway"]'
    pattern = f'attention.addresses=["unix:{tmp_path}/attention-*.sock"]'

    def wait_for(found: Cluster, count: int) -> None:
        deadline = time.monotonic() + 30.0
        while len(found.dense_status().attention_workers) != count:
            assert time.monotonic() < deadline, found.log_file.read_text()
            time.sleep(0.05)

    with attention_worker(tmp_path, "attention-a") as first, running_cluster(tmp_path, services, pattern) as found:
        wait_for_log(found.process, found.log_file, "service=gateway event=serving")
        collect_all(found.gateway, messages[:1])[0].assert_equals(of_one_worker[0])
        with attention_worker(tmp_path, "attention-b"):
            wait_for(found, 2)
            disturbed = collect_all(found.gateway, messages, lambda: first.send_signal(signal.SIGTERM))
            for collected, expected in zip(disturbed, of_one_worker, strict=True):
                collected.assert_equals(expected)
            wait_for(found, 1)


def test_the_hook_of_a_pod_that_stops_moves_its_sequences(
    tmp_path: Path, messages: list[gateway_pb2.GenerateRequest], of_one_worker: list[Collected]
) -> None:
    pods = rendered("attention")["Deployment/twostroke-attention"]["spec"]["template"]["spec"]["containers"]
    shell, flag, line = pods[0]["lifecycle"]["preStop"]["exec"]["command"]
    here = line.replace("/run/twostroke", str(tmp_path)).replace("exec python ", f"exec {sys.executable} ")

    def stop(pod: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"POD_NAME": pod}
        return subprocess.run([shell, flag, here], env=environment, capture_output=True, text=True, timeout=100.0)

    def addresses() -> set[str]:
        return {Path(each.address).name for each in found.dense_status().attention_workers}

    def wait_for(*pods: str) -> None:
        deadline = time.monotonic() + 60.0
        while addresses() != {f"attention-{pod}.sock" for pod in pods}:
            assert time.monotonic() < deadline, found.log_file.read_text()
            time.sleep(0.05)

    def drain() -> None:
        longer = [request(f"{each}. {PROMPT}", 1000, ignore_eos=True) for each in "ABCD"]  # some move in any case
        streams = [found.gateway.GenerateStream(each) for each in longer]
        for stream in streams:
            next(iter(stream))
        hook = stop("b")
        for stream in streams:
            stream.cancel()
        assert hook.returncode == 0, hook.stderr
        assert hook.stdout.endswith("attention-b.sock, which may be stopped\n")

    settings = (
        'launch.services=["dense_worker", "gateway"]',
        f"dense.address=unix:{tmp_path}/dense.sock",
        f'attention.addresses=["unix:{tmp_path}/attention-*.sock"]',
    )
    with (
        attention_worker(tmp_path, "attention-a"),
        attention_worker(tmp_path, "attention-b") as drained,
        running_cluster(tmp_path, *settings) as found,
    ):
        wait_for_log(found.process, found.log_file, "service=gateway event=serving")
        wait_for("a", "b")
        for collected, expected in zip(collect_all(found.gateway, messages, drain), of_one_worker, strict=True):
            collected.assert_equals(expected)
        assert found.num_copied_tokens() > 0 and drained.poll() is None
        refused = stop("a")
        assert refused.returncode == 1 and "attention-a.sock is the last one" in refused.stderr
        with attention_worker(tmp_path, "attention-c"):
            wait_for("a", "c")  # it was found, and the one that still runs was not found again


def test_a_worker_that_is_missing_at_start_is_named(tmp_path: Path) -> None:
    missing = f"unix:{tmp_path}/nobody.sock"
    settings = ('launch.services=["dense_worker"]', f'attention.addresses=["{missing}"]', "peers.connect_timeout_s=0.5")
    arguments = [word for each in settings for word in ("--set", each)]
    result = run_warm("services.launch", *arguments, "--set", f"dense.address=unix:{tmp_path}/d.sock", timeout_s=60.0)
    assert result.returncode != 0
    assert f"the attention worker at {missing} is not ready" in result.stderr
    assert "attention.addresses name 1, which must all run at start" in result.stderr
