"""The requests of one stream count towards the gateway's memory from their arrival to their last response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from services.pb import triton_pb2_grpc
from services.pb.triton_pb2 import InferParameter
from tests.support.clients.gateway_calls import with_gateway
from tests.support.clients.inference_messages import ASK_IDS, ENDLESS, TOKENS, Request, message
from tests.support.running_gateway import RunningGateway, until
from tests.support.workers.fake_dense import FakeDense

NUM_BYTES = 400_000  # of one message
BYTES_PER_BYTE = 4  # what docs/operations.md says of messages
# For three of them, but not for four: seven eighths of it, what one client may have, are 3.15 times as much as for one.
ROOM = 36 * BYTES_PER_BYTE * NUM_BYTES // 10
Stub = triton_pb2_grpc.GRPCInferenceServiceStub


def large(inputs: dict[str, np.ndarray], request_id: str) -> Request:
    """A request whose answer has nothing to do with its size."""
    return message(
        "tensorrt_llm", inputs, id=request_id, parameters={"note": InferParameter(string_param="x" * NUM_BYTES)}
    )


def with_stub(
    tmp_path: Path, dense: FakeDense, test: Callable[[Stub], Awaitable[None]], **options: Any
) -> None:
    async def body(gateway: RunningGateway) -> None:
        await test(Stub(gateway.channel))

    with_gateway(tmp_path, dense, body, max_held_bytes=ROOM, **options)


@pytest.mark.parametrize("num_streams", [1, 4])
def test_requests_that_run_at_once_are_counted_together(tmp_path: Path, num_streams: int) -> None:
    """In one stream as well as in several. The fourth waits for a moment, and is then refused."""
    dense = FakeDense(lambda submit: [TOKENS[0]] * 5000, step_s=0.01)

    async def test(stub: Stub) -> None:
        per_stream = 4 // num_streams

        async def requests(number: int) -> AsyncIterator[Request]:
            for index in range(per_stream):
                yield large(ENDLESS, f"{number}-{index}")
            await until(lambda: False)

        calls = []
        for number in range(num_streams):
            calls.append(stub.ModelStreamInfer(requests(number)))
            wanted = min(3, (number + 1) * per_stream)
            await until(lambda wanted=wanted: len(dense.submits) >= wanted)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in calls[-1]:
                pass
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = refused.value.details() or ""
        assert f"would exceed {ROOM} (gateway.max_held_bytes)" in details and "gateway.max_held_wait_s" in details
        assert len(dense.submits) == 3
        for call in calls:
            call.cancel()
        await until(lambda: len(dense.cancelled_seq_ids) == 3)
        dense.script = lambda submit: TOKENS  # all memory is free again
        assert (await stub.ModelInfer(large(ASK_IDS, "last"))).outputs

    with_stub(tmp_path, dense, test, max_held_wait_s=0.2)


def test_more_requests_than_have_room_are_answered_one_after_another(tmp_path: Path) -> None:
    async def test(stub: Stub) -> None:
        requests = [large(ASK_IDS, str(index)) for index in range(12)]
        responses = [each async for each in stub.ModelStreamInfer(iter(requests))]
        assert not any(each.error_message for each in responses)
        assert {each.infer_response.id for each in responses} == {each.id for each in requests}

    with_stub(tmp_path, FakeDense(lambda submit: TOKENS, step_s=0.01), test, max_held_wait_s=60.0)
