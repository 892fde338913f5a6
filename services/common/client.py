"""How services of this project reach each other: one channel with quick reconnects and no proxy."""

from __future__ import annotations

import grpc

RECONNECT_MS = 50
MAX_RECONNECT_MS = 500


def open_channel(address: str, max_message_bytes: int) -> grpc.aio.Channel:
    """A channel to a peer that may come later or come back; `max_message_bytes` of one message, both ways."""
    return grpc.aio.insecure_channel(
        address,
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS),
            ("grpc.min_reconnect_backoff_ms", RECONNECT_MS),
            ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
        ],
    )
