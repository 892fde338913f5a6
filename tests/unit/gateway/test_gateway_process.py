"""`python -m services.gateway` as a process: its config, its log, and how it stops."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.pb import gateway_pb2, gateway_pb2_grpc
from tests.support.cluster import REPOSITORY
from tests.support.running_gateway import WarmService, run, until
from tests.support.workers.fake_dense import FakeDense


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_requests_and_the_process(signal_number: int, tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(lambda submit: [5] * 5, max_model_len=100)
        address, dense_address = f"unix:{tmp_path}/gateway.sock", f"unix:{tmp_path}/dense.sock"
        await dense.start(dense_address)
        config = tmp_path / "config.toml"
        config.write_text(f'[gateway]\naddress = "{address}"\nhttp_address = "unix:{tmp_path}/http.sock"\n')
        process = WarmService(
            tmp_path,
            "services.gateway",
            *("--config", str(config)),
            *("--set", f"dense.address={dense_address}"),
            *("--set", "gateway.drain_timeout_s=0.3"),
            *("--set", "log.access=true"),
        )
        await process.wait_for_log(f"event=serving address={address}")
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


def test_without_a_dense_worker_the_process_ends_with_an_error(tmp_path: Path) -> None:
    async def test() -> None:
        address, dense_address = f"unix:{tmp_path}/gateway.sock", f"unix:{tmp_path}/dense.sock"
        addresses = [f"--set=gateway.address={address}", f"--set=dense.address={dense_address}"]
        addresses.append(f"--set=gateway.http_address=unix:{tmp_path}/http.sock")
        process = WarmService(tmp_path, "services.gateway", *addresses, "--set=peers.connect_timeout_s=0.1")
        status, _, stderr = await process.outcome()
        assert status == 1
        assert f"no dense worker at {dense_address} within 0.1 s: " in stderr
        assert "Traceback" not in stderr

    run(test())


def test_sigterm_lets_a_running_stream_finish_and_refuses_new_requests(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(lambda submit: [5] * 40, step_s=1.0, max_model_len=100)
        address, dense_address = f"unix:{tmp_path}/gateway.sock", f"unix:{tmp_path}/dense.sock"
        await dense.start(dense_address)
        process = WarmService(
            tmp_path,
            "services.gateway",
            *("--set", f"gateway.address={address}"),
            *("--set", f"gateway.http_address=unix:{tmp_path}/http.sock"),
            *("--set", f"dense.address={dense_address}"),
        )
        await process.wait_for_log(f"event=serving address={address}")
        async with grpc.aio.insecure_channel(address) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            call = stub.GenerateStream(gateway_pb2.GenerateRequest(prompt="hi", max_tokens=40))
            token_ids = list((await call.read()).token_ids)
            process.send_signal(signal.SIGTERM)
            await process.wait_for_log("event=draining num_open=1")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(gateway_pb2.GenerateRequest(prompt="hi"))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "about to stop" in caught.value.details()
            request = health_pb2.HealthCheckRequest()
            health = await health_pb2_grpc.HealthStub(channel).Check(request)
            assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
            reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/http.sock")
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503") and b"about to stop" in answer
            writer.close()
            dense.step_s = 0.0  # the rest may come at once
            while (chunk := await call.read()) is not grpc.aio.EOF:
                token_ids += chunk.token_ids
        assert len(token_ids) == 40
        status, _, stderr = await process.outcome()
        assert status == 0 and "event=drained num_left=0" in stderr
        await dense.kill()

    run(test())


def test_a_second_sigterm_does_not_wait(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(lambda submit: [5], max_model_len=100)  # no more tokens after the first one
        address, dense_address = f"unix:{tmp_path}/gateway.sock", f"unix:{tmp_path}/dense.sock"
        await dense.start(dense_address)
        process = WarmService(
            tmp_path,
            "services.gateway",
            *("--set", f"gateway.address={address}"),
            *("--set", f"gateway.http_address=unix:{tmp_path}/http.sock"),
            *("--set", f"dense.address={dense_address}"),
            *("--set", "gateway.drain_timeout_s=3600"),
        )
        await process.wait_for_log(f"event=serving address={address}")
        async with grpc.aio.insecure_channel(address) as channel:
            call = gateway_pb2_grpc.GatewayStub(channel).GenerateStream(
                gateway_pb2.GenerateRequest(prompt="hi", max_tokens=40)
            )
            await call.read()
            process.send_signal(signal.SIGTERM)
            await process.wait_for_log("event=draining")
            process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
        status, _, _ = await process.outcome()
        assert status == 0
        await dense.kill()

    run(test())


def test_only_a_gateway_that_reads_vectors_in_prompts_imports_torch() -> None:
    program = (
        "import sys\n"
        "from services.common.process import importing\n"
        "with importing():\n"
        "    from services.gateway.service import Gateway, PromptEmbedsReader\n"
        "assert 'torch' not in sys.modules\n"
        "PromptEmbedsReader(64)\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True)
