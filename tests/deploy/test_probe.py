"""The exit status of the probe, which is all that a container's health check sees."""

from __future__ import annotations

import asyncio
import datetime
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.rpc import probe
from services.rpc.server import LIVENESS
from tests.support.cluster import REPOSITORY
from tests.support.running_gateway import run as run_async
from tests.support.running_gateway import running_gateway

NAME = "some.Service"
DEADLINE_MS = "20000"  # generous: the machine may be busy
Status = health_pb2.HealthCheckResponse


@dataclass(frozen=True)
class HealthServer:
    address: str
    servicer: health.HealthServicer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HealthServer]:
    """A server that serves, while its service `NAME` does not."""
    server, servicer = grpc.server(ThreadPoolExecutor(2)), health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    servicer.set("", Status.SERVING)
    servicer.set(NAME, Status.NOT_SERVING)
    address = f"unix:{tmp_path}/health.sock"
    server.add_insecure_port(address)
    server.start()
    yield HealthServer(address, servicer)
    server.stop(None).wait()


def run(*arguments: str) -> int:
    return probe.main([*arguments, "--timeout-ms", DEADLINE_MS])


def test_the_status_tells_whether_the_service_serves(server: HealthServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--address", server.address) == 0
    assert capsys.readouterr() == ("", "")
    assert run("--address", server.address, "--service", NAME) == 4
    assert NAME in (error := capsys.readouterr().err) and "NOT_SERVING" in error
    server.servicer.set(NAME, Status.SERVING)
    assert run("--address", server.address, "--service", NAME) == 0


def test_an_unknown_service_is_an_error_of_the_call(
    server: HealthServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--address", server.address, "--service", "unknown.Service") == 3
    assert "NOT_FOUND" in capsys.readouterr().err


def test_an_address_without_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--address", f"unix:{tmp_path}/nobody.sock") == 2
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{finder.getsockname()[1]}"
        assert run("--address", address) == 2
    assert address in capsys.readouterr().err


def test_a_silent_server_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert probe.main(["--address", address, "--timeout-ms", "300"]) in (2, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--address", "a:1", "--timeout-ms", "0"),
        ("--address", "a:1", "--timeout-ms", "soon"),
        ("--address", "a:1", "--unknown"),
        ("--address", "a:1", "--tls-ca-cert", "/nowhere/ca.pem"),
        ("--address", "a:1", "--tls-client-cert", "/nowhere/client.pem"),
    ],
)
def test_a_wrong_command_line_has_a_status_of_its_own(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        probe.main(arguments)
    assert ended.value.code == 1


def test_mutual_tls(tmp_path: Path) -> None:
    key, cert = self_signed("twostroke.test")
    (tmp_path / "key.pem").write_bytes(key)
    (tmp_path / "cert.pem").write_bytes(cert)
    server, servicer = grpc.server(ThreadPoolExecutor(2)), health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    servicer.set("", Status.SERVING)
    mutual = grpc.ssl_server_credentials([(key, cert)], root_certificates=cert, require_client_auth=True)
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', mutual)}"
    server.start()
    try:
        trust = ("--address", address, "--tls-ca-cert", f"{tmp_path}/cert.pem")
        own = ("--tls-client-cert", f"{tmp_path}/cert.pem", "--tls-client-key", f"{tmp_path}/key.pem")
        name = ("--tls-server-name", "twostroke.test")
        assert run(*trust, *own, *name) == 0
        assert run(*trust, *own) == 2, "the certificate has another name"
        assert run(*trust, *name) == 2, "the client has no certificate"
        assert run("--address", address) == 2, "the client does not use TLS"
    finally:
        server.stop(None).wait()


def test_a_gateway_without_a_worker_is_alive_though_not_ready(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_gateway(tmp_path, dense=None) as gateway:
            await gateway.wait_health(Status.NOT_SERVING)
            address = ("--address", gateway.address)
            assert await asyncio.to_thread(run, *address) == 4, "it must get no traffic"
            assert await asyncio.to_thread(run, *address, "--service", LIVENESS) == 0, "it must not be restarted"

    run_async(test())


def test_the_probe_imports_no_heavy_packages(server: HealthServer) -> None:
    heavy = ("torch", "transformers", "numpy", "pydantic")
    code = (
        "import sys; from services.rpc import probe; assert probe.main(sys.argv[1:]) == 0; "
        f"loaded = [name for name in {heavy} if name in sys.modules]; sys.exit(' '.join(loaded) or 0)"
    )
    command = [sys.executable, "-c", code, "--address", server.address, "--timeout-ms", DEADLINE_MS]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def self_signed(name: str) -> tuple[bytes, bytes]:
    """A key and a self-signed certificate for `name`, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, cert.public_bytes(pem)
