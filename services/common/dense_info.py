"""How a dense worker says on a gateway's stream who it is: where calls are balanced, no other call would tell."""

from __future__ import annotations

from collections.abc import Iterable

from services.pb import dense_pb2

KEY = "dense-info-bin"  # initial metadata of `Connect`; gRPC takes bytes under names that end so

Metadata = tuple[tuple[str, bytes], ...]


def dense_info_metadata(info: dense_pb2.DenseInfo) -> Metadata:
    """What the worker sends before anything else."""
    return ((KEY, info.SerializeToString()),)


def read_dense_info(metadata: Iterable[tuple[str, str | bytes]]) -> dense_pb2.DenseInfo | None:
    """What the gateway makes of it; None where it is missing."""
    for key, value in metadata:
        if key == KEY and isinstance(value, bytes):
            return dense_pb2.DenseInfo.FromString(value)
    return None
