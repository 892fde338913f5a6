"""`python -m services.gateway` as a process: its config, its log, its end."""

from __future__ import annotations

import signal
from pathlib import Path

import grpc
import pytest

from services.pb import gateway_pb2, gateway_pb2_grpc
from tests.fake_dense import FakeDense
from tests.running_gateway import ServiceProcess, run, until


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_requests_and_process(signal_number: int, tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(lambda submit: [5] * 5, max_model_len=100)
        address, dense_address = f"unix:{tmp_path}/gateway.sock", f"unix:{tmp_path}/dense.sock"
        await dense.start(dense_address)
        config = tmp_path / "config.toml"
        config.write_text(f'[gateway]\naddress = "{address}"\nhttp_address = "unix:{tmp_path}/http.sock"\n')
        process = ServiceProcess(
            "services.gateway", "--config", str(config), f"--set=dense.address={dense_address}"
        )
        await process.read_until(f"event=serving address={address}", "stderr")
        async with grpc.aio.insecure_channel(address) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            call = stub.Generate(gateway_pb2.GenerateRequest(prompt="hi", request_id="mine"))
            await until(lambda: len(dense.running) == 1)
            process.send_signal(signal_number)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        status, stdout, stderr = await process.outcome()
        assert (status, stdout) == (0, "")
        [end] = [line for line in stderr.splitlines() if "request_id=mine" in line]
        assert "reason=error" in end
        assert "Traceback" not in stderr
        assert dense.num_streams == 0
        await dense.kill()

    run(test())


def test_a_missing_dense_worker_ends_the_process_with_its_address(tmp_path: Path) -> None:
    async def test() -> None:
        address, dense_address = f"unix:{tmp_path}/gateway.sock", f"unix:{tmp_path}/dense.sock"
        addresses = [f"--set=gateway.address={address}", f"--set=dense.address={dense_address}"]
        addresses.append(f"--set=gateway.http_address=unix:{tmp_path}/http.sock")
        process = ServiceProcess("services.gateway", *addresses, "--set=peers.connect_timeout_s=0.1")
        status, _, stderr = await process.outcome()
        assert status == 1
        assert f"no dense worker at {dense_address} within 0.1 s: " in stderr
        assert "Traceback" not in stderr

    run(test())
