"""A dense worker's description in the metadata of a gateway's stream.

Behind a load balancer a separate call could reach another replica than the stream.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.pb import dense_pb2

KEY = "dense-info-bin"  # initial metadata of `Connect`; gRPC requires the suffix -bin for bytes

Metadata = tuple[tuple[str, bytes], ...]


def dense_info_metadata(info: dense_pb2.DenseInfo) -> Metadata:
    """The initial metadata that the worker sends on a new stream."""
    return ((KEY, info.SerializeToString()),)


def read_dense_info(metadata: Iterable[tuple[str, str | bytes]]) -> dense_pb2.DenseInfo | None:
    """The description in a stream's metadata; None if it is missing."""
    for key, value in metadata:
        if key == KEY and isinstance(value, bytes):
            return dense_pb2.DenseInfo.FromString(value)
    return None
