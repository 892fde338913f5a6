"""Computes one token on a dense worker, to check that weights, engine, channel and attention worker work together."""

from __future__ import annotations

import asyncio
import secrets

import grpc

from services.common.errors import CapacityError, PeerError
from services.pb import dense_pb2, dense_pb2_grpc, sampling_pb2, sequence_pb2

MOST_URGENT = -(2**31)
TOKEN_ID = 0  # every vocabulary has it


async def compute_one_token(dense: dense_pb2_grpc.DenseWorkerStub, timeout_s: float) -> bool:
    """Runs a sequence with priority over those of gateways. Returns whether it ran in time: a worker may be full.

    Raises `PeerError` if the worker breaks.
    """
    spec = sequence_pb2.SequenceSpec(
        request_id="probe-of-the-launcher",
        prompt_token_ids=[TOKEN_ID],
        sampling=sampling_pb2.SamplingParams(temperature=0.0),
        max_tokens=1,
        priority=MOST_URGENT,
    )
    submit = dense_pb2.Submit(seq_id=secrets.randbits(64), spec=spec)
    call = dense.Connect()
    try:
        async with asyncio.timeout(timeout_s):
            await call.write(dense_pb2.GatewayMessage(submit=submit))
            async for output in call:
                if output.HasField("farewell"):
                    raise PeerError(f"it ended the stream: {output.farewell.reason}")
                for end in output.ended:
                    if end.status_code == CapacityError.status_code.value[0]:
                        return False
                    if end.reason == dense_pb2.SequenceEnd.ERROR:
                        raise PeerError(f"it failed a sequence: {end.message}")
                    return True
        raise PeerError("it ended the stream")
    except TimeoutError:
        return False
    except grpc.aio.AioRpcError as error:
        raise PeerError(f"{error.code().name}: {error.details()}") from error
    finally:
        call.cancel()
