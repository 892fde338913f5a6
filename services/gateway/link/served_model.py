"""The model that a dense worker serves, as the worker describes it before it gets a sequence."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc
import structlog

from services.common.dense_info import read_dense_info
from services.common.errors import PeerError
from services.common.memory_file import MemoryFile
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.stream_socket import read_offer

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The properties of the served model that requests depend on."""

    family: str
    dtype: str
    vocab_size: int  # token ids
    num_layers: int
    max_model_len: int  # tokens of prompt and output together
    weights_hash: str  # hexadecimal
    max_beam_width: int = 0  # beams of a search; 0: there are no searches
    max_num_seqs: int = 0  # sequences that run at once
    hidden_size: int = 0  # values of a hidden state; 0: there are none to be had
    continues_sequences: bool = False  # whether sequences of earlier weights go on
    has_gpu: bool = False


def served_model(info: dense_pb2.DenseInfo) -> ServedModel:
    """The properties of a `DenseInfo` message that requests depend on."""
    return ServedModel(
        family=info.family,
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        num_layers=info.num_layers,
        max_model_len=info.max_model_len,
        weights_hash=info.weights_hash,
        max_beam_width=info.max_beam_width,
        max_num_seqs=info.max_num_seqs,
        hidden_size=info.hidden_size,
        continues_sequences=info.continues_sequences,
        has_gpu=info.device != "cpu",
    )


WAIT_MS = 1000  # that a worker may take to become ready before it says why it is not


async def ask_info(stub: dense_pb2_grpc.DenseWorkerStub, timeout_s: float) -> dense_pb2.DenseInfo:
    """Asks for the description by a separate call, on a channel to a single worker. Raises `PeerError`.

    A worker that is about to serve answers when it does, so that no retry comes too late.
    """
    request, example = dense_pb2.GetInfoRequest(wait_ms=WAIT_MS), _example()
    if example is not None:
        request.example.CopyFrom(example.describe())
    try:
        return await stub.GetInfo(request, timeout=timeout_s + WAIT_MS / 1000)
    except grpc.aio.AioRpcError as error:
        raise peer_error(error) from error


def _example() -> MemoryFile | None:
    """A memory file, for the worker to try; None if there can be none, so that pixels are sent."""
    try:
        example = MemoryFile(b"example")
        example.seal()
    except OSError as error:
        log.warning("no memory files for pixels, which are sent instead", reason=str(error))
        return None
    return example


async def wait_info(call: grpc.aio.StreamStreamCall, timeout_s: float) -> dense_pb2.DenseInfo:
    """Reads the description from a stream's metadata: another call could reach another replica. Raises `PeerError`."""
    info = read_dense_info(await _wait_metadata(call, timeout_s))
    if info is None:  # the call has failed
        raise PeerError(f"{(await call.code()).name}: {await call.details()}")
    return info


async def wait_offer(call: grpc.aio.StreamStreamCall, timeout_s: float) -> str | None:
    """The socket for a stream's messages that its metadata name; None: there is none. Raises `PeerError`."""
    return read_offer(await _wait_metadata(call, timeout_s))


async def _wait_metadata(call: grpc.aio.StreamStreamCall, timeout_s: float) -> grpc.aio.Metadata:
    try:
        async with asyncio.timeout(timeout_s):
            return await call.initial_metadata()
    except TimeoutError:
        raise PeerError(f"no dense worker took the stream within {timeout_s:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise peer_error(error) from error


def peer_error(error: grpc.aio.AioRpcError) -> PeerError:
    """A `PeerError` with the message of a failed call to a dense worker."""
    return PeerError(f"{error.code().name}: {error.details()}")
