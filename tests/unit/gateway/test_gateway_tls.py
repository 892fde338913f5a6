"""TLS and mutual TLS over gRPC and HTTP, and the warning about a gateway that everybody can reach."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from services.common.errors import ConfigError
from services.pb import gateway_pb2, gateway_pb2_grpc
from services.rpc.tls import is_exposed, tls_files
from tests.support.certificates import Authority, Pair
from tests.support.cluster import free_port
from tests.support.running_gateway import RunningGateway, run, running_gateway
from tests.support.workers.fake_dense import FakeDense


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def options(tmp_path: Path, server: Pair, client_ca: Path | None = None) -> dict[str, object]:
    return {
        "address": free_address(),
        "local_address": f"unix:{tmp_path}/local.sock",
        "tls_certificate": server.certificate,
        "tls_key": server.key,
        "tls_client_ca": client_ca,
    }


async def ask_grpc(gateway: RunningGateway, ca: Path, client: Pair | None = None) -> list[int]:
    """Requests an answer by gRPC over TLS; returns its tokens. Raises `AioRpcError`."""
    key, certificate = (None, None) if client is None else (client.key.read_bytes(), client.certificate.read_bytes())
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key, certificate)
    async with grpc.aio.secure_channel(gateway.address, credentials) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        response = await stub.Generate(gateway_pb2.GenerateRequest(prompt="hi", max_tokens=3), timeout=20)
        return list(response.completions[0].token_ids)


async def ask_http(tmp_path: Path, ca: Path, client: Pair | None = None) -> bytes:
    """Requests /ready over TLS; returns the status line. Raises `ssl.SSLError` or `ConnectionError`."""
    context = ssl.create_default_context(cafile=str(ca))
    if client is not None:
        context.load_cert_chain(client.certificate, client.key)
    reader, writer = await asyncio.open_unix_connection(
        f"{tmp_path}/http.sock", ssl=context, server_hostname="localhost"
    )
    try:
        writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        line = await reader.readline()
    finally:
        writer.close()
    if not line:
        raise ConnectionResetError("the server closed the connection")
    return line


def test_grpc_and_http_accept_only_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "good")

    async def test() -> None:
        dense = FakeDense(lambda submit: [5] * 3)
        async with running_gateway(tmp_path, dense, **options(tmp_path, authority.sign("server"))) as gateway:
            assert await ask_grpc(gateway, authority.file) == [5] * 3
            assert await ask_http(tmp_path, authority.file) == b"HTTP/1.1 200 OK\r\n"
            with pytest.raises(grpc.aio.AioRpcError):
                await ask_grpc(gateway, Authority(tmp_path, "other").file)
            async with grpc.aio.insecure_channel(gateway.address) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await gateway_pb2_grpc.GatewayStub(channel).ModelInfo(gateway_pb2.ModelInfoRequest(), timeout=5)
            reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/http.sock")
            writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"HTTP" not in await reader.read(100)
            writer.close()

    run(test())


def test_a_connection_without_a_handshake_is_closed(tmp_path: Path) -> None:
    pair = Authority(tmp_path, "good").sign("server")

    async def test() -> None:
        limits = {"http_address": free_address(), "header_timeout_s": 0.3}
        async with running_gateway(tmp_path, FakeDense(lambda submit: [5]), **options(tmp_path, pair), **limits) as it:
            for address, sent in itertools.product((it.address, it.http_address), (b"", b"\x16\x03\x01")):
                reader, writer = await asyncio.open_connection(*address.split(":"))
                writer.write(sent)
                # The limit of `run` is shorter than the timeouts of uvicorn and gRPC, which are minutes.
                assert await reader.read() == b""
                writer.close()

    run(test())


def test_mutual_tls_serves_only_certificates_of_the_authority(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path, "good"), Authority(tmp_path, "stranger")
    server, client, impostor = authority.sign("server"), authority.sign("client"), stranger.sign("impostor")

    async def test() -> None:
        dense = FakeDense(lambda submit: [5] * 3)
        async with running_gateway(tmp_path, dense, **options(tmp_path, server, authority.file)) as gateway:
            assert await ask_grpc(gateway, authority.file, client) == [5] * 3
            assert await ask_http(tmp_path, authority.file, client) == b"HTTP/1.1 200 OK\r\n"
            for refused in (None, impostor):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask_grpc(gateway, authority.file, refused)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    await ask_http(tmp_path, authority.file, refused)
            assert len(dense.submits) == 1
            await gateway.wait_serving()  # at the local address, which needs no certificate

    run(test())


def test_unusable_tls_files_are_errors_at_start(tmp_path: Path) -> None:
    one, other = (Authority(tmp_path, name).sign(name + "-server") for name in ("one", "other"))
    with pytest.raises(ConfigError, match=r"/nowhere/cert\.pem"):
        tls_files(Path("/nowhere/cert.pem"), one.key, None)
    with pytest.raises(ConfigError, match=r"one-server\.pem.*other-server\.key.*MISMATCH"):
        tls_files(one.certificate, other.key, None)
    (tmp_path / "garbage.pem").write_text("garbage")
    with pytest.raises(ConfigError, match=r"garbage\.pem"):
        tls_files(one.certificate, one.key, tmp_path / "garbage.pem")
    assert tls_files(one.certificate, one.key, tmp_path / "one-ca.pem") is not None


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("unix:/tmp/x", False),
        ("127.0.0.1:1", False),
        ("127.1.2.3:1", False),
        ("[::1]:1", False),
        ("localhost:1", False),
        ("0.0.0.0:1", True),
        ("[::]:1", True),
        ("192.168.1.2:1", True),
        ("example.org:1", True),
    ],
)
def test_which_addresses_others_can_reach(address: str, expected: bool) -> None:
    assert is_exposed(address) is expected


def test_an_address_without_tls_or_keys_that_others_can_reach_logs_a_warning(tmp_path: Path) -> None:
    address = f"0.0.0.0:{free_address().rpartition(':')[2]}"

    async def test() -> None:
        with capture_logs() as logs:
            async with running_gateway(tmp_path, FakeDense(lambda submit: [5]), address=address):
                pass
        warnings = [each["event"] for each in logs if each["log_level"] == "warning" and each.get("address") == address]
        assert len(warnings) == 2
        assert any("not encrypted" in each for each in warnings)
        assert any("no API keys" in each for each in warnings)

    run(test())
