"""Who is at the other end of a stream: what a dense worker says of itself before it gets a sequence."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

from services.common.dense_info import read_dense_info
from services.common.errors import PeerError
from services.pb import dense_pb2, dense_pb2_grpc


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the dense worker says it serves."""

    family: str
    dtype: str
    vocab_size: int  # token ids
    num_layers: int
    max_model_len: int  # tokens of prompt and output together
    weights_hash: str  # hexadecimal


def served_model(info: dense_pb2.DenseInfo) -> ServedModel:
    """The part of the message that requests depend on."""
    return ServedModel(
        family=info.family,
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        num_layers=info.num_layers,
        max_model_len=info.max_model_len,
        weights_hash=info.weights_hash,
    )


async def ask_info(stub: dense_pb2_grpc.DenseWorkerStub, timeout_s: float) -> dense_pb2.DenseInfo:
    """By a call of its own, over a channel to one worker. Raises `PeerError`."""
    try:
        return await stub.GetInfo(dense_pb2.GetInfoRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise peer_error(error) from error


async def wait_info(call: grpc.aio.StreamStreamCall, timeout_s: float) -> dense_pb2.DenseInfo:
    """Of the worker that took the call: one of several, so that nobody else could tell. Raises `PeerError`."""
    try:
        async with asyncio.timeout(timeout_s):
            info = read_dense_info(await call.initial_metadata())
            if info is None:  # the call has failed
                raise PeerError(f"{(await call.code()).name}: {await call.details()}")
            return info
    except TimeoutError:
        raise PeerError(f"no dense worker took the stream within {timeout_s:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise peer_error(error) from error


def peer_error(error: grpc.aio.AioRpcError) -> PeerError:
    """Why a call to a dense worker failed, in its own words."""
    return PeerError(f"{error.code().name}: {error.details()}")
