"""How services of this project reach each other: one channel with quick reconnects and no proxy."""

from __future__ import annotations

import json

import grpc

from services.common.config import BALANCED_SCHEMES

RECONNECT_MS = 50
MAX_RECONNECT_MS = 500
# Of workers on other machines: one that vanishes without a word is noticed within the sum of the two.
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
DENSE_WORKER = "twostroke.dense.v1.DenseWorker"
# Every call goes to the next of those that answer `grpc.health.v1` that they serve.
ROUND_ROBIN = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": DENSE_WORKER}}


def is_balanced(address: str) -> bool:
    """Whether an address stands for replicas of the dense worker, among which gRPC takes turns."""
    return address.startswith(BALANCED_SCHEMES)


def open_channel(address: str, max_message_bytes: int) -> grpc.aio.Channel:
    """A channel to a peer that may come later or come back; `max_message_bytes` of one message, both ways."""
    balancing: list[tuple[str, object]] = []
    if is_balanced(address):
        balancing = [
            ("grpc.service_config", json.dumps(ROUND_ROBIN)),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ]
    return grpc.aio.insecure_channel(
        address,
        options=[
            *balancing,
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS),
            ("grpc.min_reconnect_backoff_ms", RECONNECT_MS),
            ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
        ],
    )
