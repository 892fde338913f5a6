"""A cluster with mutual TLS everywhere: for the gateway's clients, and between the services.

The clients are the `openai` package, gRPC, and this project's own programs.
"""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.child_options import ChildOptions
from services.common.config import EMBEDDED_MODEL, load_config
from services.gateway import chat_client
from services.launch.child import Child
from services.launch.lifelines import Lifelines
from services.pb import attn_pb2, attn_pb2_grpc, dense_pb2, dense_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from services.rpc import probe
from tests.support.certificates import Authority, Pair
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, free_port, running_cluster
from tests.support.warm_process import run_warm

PROMPT = "San Francisco is a"
REQUEST = gateway_pb2.GenerateRequest(prompt=PROMPT, max_tokens=8, sampling={"temperature": 0})


@dataclass(frozen=True)
class Locked:
    """A cluster and its two authorities: a client's certificate is not valid for the workers.

    `stranger` is an authority that nobody here trusts; it signed the `impostor`'s certificate.
    """

    cluster: Cluster
    overrides: list[str]  # of the cluster's config
    clients: Authority
    client: Pair
    peers: Authority
    peer: Pair
    stranger: Authority
    impostor: Pair
    worker_addresses: dict[str, str]

    @property
    def client_flags(self) -> list[str]:
        return flags(self.cluster.address, self.clients, self.client)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    directory = tmp_path_factory.mktemp("tls")
    clients, peers, stranger = (Authority(directory, name) for name in ("clients", "peers", "stranger"))
    server, peer = clients.sign("server"), peers.sign("peer")
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("gateway", "http", "dense", "attention")}
    settings = {
        "gateway.address": addresses["gateway"],
        "gateway.http_address": addresses["http"],
        "gateway.local_address": f"unix:{directory}/gateway.sock",  # `Cluster` connects here
        "gateway.tls_certificate": server.certificate,
        "gateway.tls_key": server.key,
        "gateway.tls_client_ca": clients.file,
        "dense.address": addresses["dense"],
        "attention.address": addresses["attention"],
        "peers.tls_certificate": peer.certificate,
        "peers.tls_key": peer.key,
        "peers.tls_ca": peers.file,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    with running_cluster(directory, *overrides, is_warm=True) as cluster:
        yield Locked(
            cluster,
            overrides,
            clients,
            clients.sign("client"),
            peers,
            peer,
            stranger,
            stranger.sign("impostor"),
            {name: addresses[name] for name in ("dense", "attention")},
        )


def flags(address: str, ca: Authority, own: Pair | None) -> list[str]:
    """Command-line flags of this project's own programs."""
    own_flags = [] if own is None else ["--tls-client-cert", str(own.certificate), "--tls-client-key", str(own.key)]
    return ["--address", address, "--tls-ca-cert", str(ca.file), *own_flags]


def secure_channel(address: str, ca: Authority, own: Pair | None) -> grpc.Channel:
    key, certificate = (None, None) if own is None else (own.key.read_bytes(), own.certificate.read_bytes())
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca.file.read_bytes(), key, certificate))


def openai_client(locked: Locked, ca: Authority, own: Pair | None) -> openai.OpenAI:
    context = ssl.create_default_context(cafile=ca.file)
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return openai.OpenAI(
        base_url=f"https://{locked.cluster.http_address}/v1",
        api_key="none",
        max_retries=0,
        timeout=REQUEST_TIMEOUT_S,
        http_client=openai.DefaultHttpxClient(verify=context),
    )


def test_openai_and_grpc_clients_with_certificates_get_the_same_answer(locked: Locked) -> None:
    with secure_channel(locked.cluster.address, locked.clients, locked.client) as channel:
        answer = gateway_pb2_grpc.GatewayStub(channel).Generate(REQUEST, timeout=REQUEST_TIMEOUT_S)
    client = openai_client(locked, locked.clients, locked.client)
    options = {"model": EMBEDDED_MODEL.name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**options)
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**options, stream=True) if chunk.choices]
    assert answer.completions[0].text
    assert whole.choices[0].text == "".join(pieces) == answer.completions[0].text


@pytest.mark.parametrize("kind", ["without a certificate", "with a stranger's", "that trusts somebody else"])
def test_a_client_is_refused(locked: Locked, kind: str) -> None:
    ca, own = {
        "without a certificate": (locked.clients, None),
        "with a stranger's": (locked.clients, locked.impostor),
        "that trusts somebody else": (locked.stranger, locked.client),
    }[kind]
    with pytest.raises(openai.APIConnectionError):
        openai_client(locked, ca, own).models.list()
    with (
        secure_channel(locked.cluster.address, ca, own) as channel,
        pytest.raises(grpc.RpcError, match="UNAVAILABLE"),
    ):
        gateway_pb2_grpc.GatewayStub(channel).Generate(REQUEST, timeout=REQUEST_TIMEOUT_S)
    assert probe.main([*flags(locked.cluster.address, ca, own), "--timeout-ms", "5000"]) is probe.ExitCode.UNREACHABLE


def test_our_own_programs_take_certificates(locked: Locked, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", PROMPT, "--max-tokens", "8"]
    assert chat_client.main([*locked.client_flags, *arguments]) == 0
    with_certificate = capsys.readouterr().out
    local = f"unix:{Path(locked.cluster.log_file).parent}/gateway.sock"
    assert chat_client.main(["--address", local, *arguments]) == 0
    assert capsys.readouterr().out == with_certificate != ""
    assert probe.main([*locked.client_flags, "--timeout-ms", "20000"]) is probe.ExitCode.SERVING
    for address in locked.worker_addresses.values():
        own = flags(address, locked.peers, locked.peer)
        assert probe.main([*own, "--timeout-ms", "20000"]) is probe.ExitCode.SERVING


@pytest.mark.parametrize("worker", ["dense", "attention"])
@pytest.mark.parametrize("who", ["nobody", "a client of the gateway", "plain text"])
def test_workers_serve_only_services_of_the_cluster(locked: Locked, worker: str, who: str) -> None:
    address = locked.worker_addresses[worker]
    channel = {
        "nobody": lambda: secure_channel(address, locked.peers, None),
        "a client of the gateway": lambda: secure_channel(address, locked.peers, locked.client),
        "plain text": lambda: grpc.insecure_channel(address),
    }[who]()
    with channel, pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        ask_status(worker, channel)
    with secure_channel(address, locked.peers, locked.peer) as channel:
        ask_status(worker, channel)  # the same call is answered


def ask_status(worker: str, channel: grpc.Channel) -> None:
    if worker == "dense":
        dense_pb2_grpc.DenseWorkerStub(channel).GetStatus(dense_pb2.GetStatusRequest(), timeout=REQUEST_TIMEOUT_S)
    else:
        attn_pb2_grpc.AttentionWorkerStub(channel).GetStatus(attn_pb2.GetStatusRequest(), timeout=REQUEST_TIMEOUT_S)


@pytest.mark.parametrize("role", ["attn_worker", "dense_worker", "gateway"])
def test_the_launcher_can_ask_every_service_for_its_health(locked: Locked, tmp_path: Path, role: str) -> None:
    """Otherwise the launcher would restart services that it takes for dead."""
    own = {"run_dir": tmp_path, "environment": None, "lifelines": Lifelines()}
    child = Child(role, role, load_config(None, locked.overrides), ChildOptions(), **own)

    async def ask() -> int:
        async with child.open_channel() as channel:
            health = health_pb2_grpc.HealthStub(channel)
            return (await health.Check(health_pb2.HealthCheckRequest(), timeout=REQUEST_TIMEOUT_S)).status

    assert asyncio.run(ask()) == health_pb2.HealthCheckResponse.SERVING


def launch(*overrides: str) -> subprocess.CompletedProcess[str]:
    settings = (part for override in overrides for part in ("--set", override))
    return run_warm("services.launch", "--prompt", "hi", "--max-tokens", "1", *settings)


def test_the_error_at_the_start_names_the_wrong_file(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "good")
    server = authority.sign("server")
    (tmp_path / "garbage.pem").write_text("garbage")
    for key, file, words in (
        ("gateway.tls_key", tmp_path / "missing.key", "No such file"),
        ("peers.tls_ca", tmp_path / "garbage.pem", "cannot be used"),
    ):
        section = key.partition(".")[0]
        ca = "tls_client_ca" if section == "gateway" else "tls_ca"
        settings = {
            f"{section}.tls_certificate": server.certificate,
            f"{section}.tls_key": server.key,
            f"{section}.{ca}": authority.file,
        } | {key: file}
        result = launch(*(f"{name}={value}" for name, value in settings.items()))
        assert result.returncode == 1
        assert str(file) in result.stderr
        assert words in result.stderr
        assert "Traceback" not in result.stderr
    result = launch(f"peers.tls_key={server.key}")
    assert (result.returncode, result.stderr) == (
        1,
        "services.launch: peers.tls_certificate, peers.tls_key and peers.tls_ca belong together\n",
    )
