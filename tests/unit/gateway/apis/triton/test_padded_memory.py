"""Outputs are as long as the longest of their rows: a long one beside many short ones takes many times its size."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest

from services.gateway.apis.triton.answers import Column
from services.gateway.apis.triton.tensors import Tensor
from services.pb import triton_pb2_grpc
from tests.support.clients.gateway_calls import REFERENCE, with_gateway
from tests.support.clients.inference_messages import int32, message, output, texts
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

NUM_ROWS = 32
ROOM = 4_000_000


def test_the_tokens_of_texts_are_held_with_what_fills_them_up(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        stub = triton_pb2_grpc.GRPCInferenceServiceStub(gateway.channel)
        long = "!?" * 20_000

        async def preprocess(given: list[str]) -> np.ndarray:
            inputs = {"QUERY": texts(*([each] for each in given)), "REQUEST_OUTPUT_LEN": int32(*([1] for _ in given))}
            return output(await stub.ModelInfer(message("preprocessing", inputs)), "INPUT_ID")

        expected = REFERENCE.encode(long)
        assert 2 * 4 * len(expected) < ROOM < NUM_ROWS * 4 * len(expected)
        both = await preprocess([long, "a"])
        assert both[0].tolist() == expected and both[1][:2].tolist() == REFERENCE.encode("a")[:2]
        with pytest.raises(grpc.aio.AioRpcError, match="for tokens padded to equal lengths") as refused:
            await preprocess([long] + ["a"] * (NUM_ROWS - 1))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "gateway.max_held_bytes is 4000000" in (refused.value.details() or "")
        assert (await preprocess([long, "a"])).tolist() == both.tolist(), "all memory is free again"

    with_gateway(tmp_path, FakeDense(lambda _: []), test, max_held_bytes=ROOM)


@pytest.mark.parametrize("name", ["context_logits", "output_ids"])
def test_joined_outputs_are_as_large_as_reckoned(name: str) -> None:
    sizes = [(1, 1, 5), (1, 1, 900), (1, 1, 2)] if name == "output_ids" else [(1, 5, 7), (1, 900, 7), (1, 2, 7)]
    datatype, numpy_type = ("INT32", np.int32) if name == "output_ids" else ("FP32", np.float32)
    parts = [Tensor(name, datatype, np.ones(size, numpy_type)) for size in sizes]
    column = Column(parts, (3, 1))
    assert column.num_joined_bytes == 3 * max(each.values.nbytes for each in parts)
    assert Column(parts[:1], (1, 1)).num_joined_bytes == 0
