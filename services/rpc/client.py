"""gRPC channels between the services: quick reconnects, no proxy, and TLS if configured."""

from __future__ import annotations

import json
from dataclasses import dataclass

import grpc

from services.common.addresses import BALANCED_SCHEMES
from services.common.config import PeerSection
from services.rpc.tls import TlsFiles, tls_files

NOBODY_LISTENS = ("failed to connect to all addresses", "errors resolving")  # gRPC's words
RECONNECT_MS = 20  # streams wait for a worker that is back
MAX_RECONNECT_MS = 100
CONNECT_TIMEOUT_MS = 1000  # of one attempt: a busy worker answers late
# For workers on other machines: a worker that vanishes silently is noticed within the sum of the two. The server must
# permit it: `MIN_PING_INTERVAL_MS`.
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
DENSE_WORKER = "twostroke.dense.v1.DenseWorker"
# Calls go in turn to all replicas that report SERVING to `grpc.health.v1`.
ROUND_ROBIN = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": DENSE_WORKER}}


def found_nobody(error: grpc.RpcError) -> bool:
    """Whether a call of a client failed because no server listens at the address."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and (error.details() or "").startswith(NOBODY_LISTENS)


def nobody_answers(address: str, api: str) -> str:
    """What to tell the user of a client that found no server. `api`: the one whose address it needs, gRPC or HTTP."""
    return (
        f"nobody answers at {address}: start a server, as `twostroke serve` does, or name its {api} address by "
        "--address"
    )


def is_balanced(address: str) -> bool:
    """Whether an address names replicas of the dense worker, among which gRPC distributes the calls."""
    return address.startswith(BALANCED_SCHEMES)


@dataclass(frozen=True, slots=True)
class PeerTls:
    """TLS between the services of one cluster: each has this certificate, or one that the same CA has signed."""

    files: TlsFiles
    server_name: str | None  # name in the workers' certificates; None: the host of the address (localhost for a socket)


def read_peer_tls(peers: PeerSection) -> PeerTls | None:
    """The TLS files of the config; None without TLS. Raises `ConfigError` for files that cannot be used."""
    files = tls_files(peers.tls_certificate, peers.tls_key, peers.tls_ca)
    return None if files is None else PeerTls(files, peers.tls_server_name)


def open_channel(address: str, max_message_bytes: int, tls: PeerTls | None = None) -> grpc.aio.Channel:
    """A channel to a peer, which may start later and may restart.

    `max_message_bytes` limits one message in either direction.
    """
    options = _options(address, max_message_bytes)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.files.channel_credentials(), options=[*options, *_name(tls)])


def open_blocking_channel(address: str, max_message_bytes: int, tls: PeerTls | None = None) -> grpc.Channel:
    """The same, for a thread that waits for its calls."""
    options = _options(address, max_message_bytes)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.files.channel_credentials(), options=[*options, *_name(tls)])


def _options(address: str, max_message_bytes: int) -> list[tuple[str, object]]:
    options: list[tuple[str, object]] = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # in fact the time limit of an attempt
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),  # every channel gets a connection of its own
    ]
    if is_balanced(address):
        options += [
            ("grpc.service_config", json.dumps(ROUND_ROBIN)),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
            ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # otherwise a minute, whatever the former says
            ("grpc.http2.max_pings_without_data", 0),  # no limit; otherwise two, and then one a minute
        ]
    return options


def _name(tls: PeerTls) -> list[tuple[str, object]]:
    """What says which name the peer's certificate must have, if it is not that of its address."""
    return [] if tls.server_name is None else [("grpc.ssl_target_name_override", tls.server_name)]
