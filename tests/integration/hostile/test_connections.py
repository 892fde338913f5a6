"""Crowds of connections to a cluster whose processes may open few files."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

import grpc
import httpx2
import pytest

from services.pb import gateway_pb2_grpc
from tests.support.cluster import REQUEST_TIMEOUT_S, free_port, request, running_cluster
from tests.support.models import TWO_LAYERS

MAX_OPEN_FILES = 256
FEW_FILES = ("sh", "-c", f'ulimit -n {MAX_OPEN_FILES} && exec "$@"', "sh")
STALL_TIMEOUT_S = 4.0  # the launcher kills a service that does not answer for this long
HELD_S = 4 * STALL_TIMEOUT_S
NUM_TOKENS = 600
MAX_HELD = 400  # connections of one crowd at once: more than there are files


class Crowd:
    """Connections that send nothing and stay open; those that the server ends are replaced."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_connected = 0
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(REQUEST_TIMEOUT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.ExitStack() as held:
            num_held = 0
            while not self._is_over.wait(0.002):
                bare = held.enter_context(socket.socket())
                bare.settimeout(1.0)
                with contextlib.suppress(OSError):
                    bare.connect(self._target)
                    self.num_connected += 1
                num_held += 1
                if num_held == MAX_HELD:
                    held.close()
                    num_held = 0


@pytest.mark.timeout(200)
def test_a_gateway_that_cannot_open_more_files_is_not_restarted(tmp_path: Path) -> None:
    address, http_address = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    overrides = (
        TWO_LAYERS,
        f"gateway.address={address}",
        f"gateway.http_address={http_address}",
        f"watchdog.stall_timeout_s={STALL_TIMEOUT_S}",
    )
    with running_cluster(tmp_path, *overrides, wrapper=FEW_FILES, is_warm=True) as cluster:
        gateway_pid = cluster.pid_of("gateway")
        with grpc.insecure_channel(address) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            stream = stub.GenerateStream(request("Hello", NUM_TOKENS, ignore_eos=True), timeout=REQUEST_TIMEOUT_S)
            num_tokens = len(next(stream).token_ids)
            crowds = [Crowd(address), Crowd(http_address)]
            try:
                deadline = time.monotonic() + HELD_S
                num_tokens += sum(len(chunk.token_ids) for chunk in stream)
                time.sleep(max(0.0, deadline - time.monotonic()))
                assert all(crowd.num_connected > MAX_HELD for crowd in crowds), "too few connections"
            finally:
                for crowd in crowds:
                    crowd.stop()
            assert num_tokens == NUM_TOKENS, "a stream from before the crowd was disturbed"
        assert cluster.pid_of("gateway") == gateway_pid
        assert "restarting" not in cluster.log_file.read_text()
        with grpc.insecure_channel(address) as channel:
            answer = gateway_pb2_grpc.GatewayStub(channel).Generate(
                request("Hello", 3), timeout=REQUEST_TIMEOUT_S, wait_for_ready=True
            )
            assert len(answer.completions[0].token_ids) == 3
        body = {"prompt": "Hello", "max_tokens": 3}
        response = httpx2.post(f"http://{http_address}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
        assert response.json()["usage"]["completion_tokens"] == 3
