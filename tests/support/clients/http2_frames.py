"""HTTP/2 frames built by hand (RFC 9113), for a gRPC client that breaks rules which every library follows."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
INITIAL_WINDOW_SIZE = 4
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream_id) + payload


def begin(window_bytes: int | None = None) -> bytes:
    """The first frames of a connection. `window_bytes`: the client accepts no more of each answer."""
    setting = b"" if window_bytes is None else struct.pack(">HI", INITIAL_WINDOW_SIZE, window_bytes)
    return PREFACE + frame(SETTINGS, 0, 0, setting)


def call(stream_id: int, method: str, message: bytes = b"") -> bytes:
    """A whole gRPC call. `stream_id` must be odd, and greater than that of the previous call."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    # Each header is a literal without an index and without Huffman coding (RFC 7541, section 6.2.2).
    fields = b"".join(
        b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in header) for header in headers.items()
    )
    prefix = struct.pack(">BI", 0, len(message))  # prefix of a message that is not compressed
    return frame(HEADERS, END_HEADERS, stream_id, fields) + frame(DATA, END_STREAM, stream_id, prefix + message)
