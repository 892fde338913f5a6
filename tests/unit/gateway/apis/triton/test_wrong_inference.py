"""Wrong inference requests over gRPC: each is refused with value and limit, and the gateway goes on."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import grpc
import numpy as np
import pytest

from services.pb import triton_pb2, triton_pb2_grpc
from tests.support.clients.inference_messages import (
    ASK,
    ASK_IDS,
    PROMPT,
    PROMPT_IDS,
    STOP,
    Request,
    int32,
    message,
    output,
    texts,
    with_stub,
)


def changed(name: str, values: np.ndarray) -> Request:
    return message("ensemble", {**ASK, name: values})


def with_raw(data: bytes, shape: Sequence[int] = (1, 1), name: str = "text_input", datatype: str = "BYTES") -> Request:
    """A request whose first input has these bytes."""
    request = message("ensemble", {name: texts([PROMPT]), **{k: v for k, v in ASK.items() if k != name}})
    request.inputs[0].shape[:] = shape
    request.inputs[0].datatype = datatype
    request.raw_input_contents[0] = data
    return request


def with_parameter(what: str, name: str) -> Request:
    request = message("ensemble", ASK, outputs=[Request.InferRequestedOutputTensor(name="text_output")])
    getattr(request, what)[0].parameters[name].string_param = "region"
    return request


WRONG = {
    "missing input": (message("ensemble", {"text_input": ASK["text_input"]}), ["max_tokens", "INT32", "[batch, 1]"]),
    "no inputs": (Request(model_name="ensemble"), ["text_input"]),
    "unknown input": (changed("nothing", int32([1])), ["no input 'nothing'"]),
    "input twice": (Request(model_name="ensemble", inputs=[*message("ensemble", ASK).inputs] * 2), ["has 0 values"]),
    "wrong type": (changed("max_tokens", np.array([[1.0]], dtype=np.float32)), ["FP32", "INT32 or UINT32"]),
    "wrong shape": (changed("max_tokens", int32([1, 2])), ["[1, 2]", "[batch, 1]"]),
    "no batch": (changed("max_tokens", np.array([1], dtype=np.int32)), ["[1]", "[batch, 1]"]),
    "two batches": (changed("max_tokens", int32([1], [2])), ["batch of 2", "have 1"]),
    "large batch": (message("ensemble", {"text_input": texts(*[["a"]] * 65), "max_tokens": int32([1])}), ["65", "64"]),
    "empty batch": (with_raw(b"", (0, 1)), ["batch of 0"]),
    "length beyond the data": (with_raw(struct.pack("<I", 2**31) + b"x"), ["2147483648 bytes", "1 are left"]),
    "length cut": (with_raw(b"\x01\x00"), ["ends before its string 0"]),
    "bytes too many": (with_raw(struct.pack("<I", 1) + b"xyz"), ["2 bytes after"]),
    "not UTF-8": (with_raw(struct.pack("<I", 1) + b"\xff"), ["text_input is not UTF-8"]),
    "huge shape": (with_raw(b"", (2**40, 2**40)), ["strings", "8192"]),
    "huge shape of numbers": (with_raw(b"", (2**60, 2**60), "text_input", "INT32"), ["has 0 bytes"]),
    "huge empty shape": (with_raw(b"", (2**62, 0)), ["no elements", "4096"]),
    "negative shape": (with_raw(b"", (-1, -1)), ["[-1, -1]", "negative"]),
    "many dimensions": (with_raw(b"", [1] * 9), ["9 dimensions", "8"]),
    "unknown type": (with_raw(b"", (1, 1), "text_input", "FP8"), ["FP8", "not supported"]),
    "raw contents missing": (
        Request(model_name="ensemble", inputs=message("ensemble", ASK).inputs, raw_input_contents=[b""]),
        ["has 1 elements", "2"],
    ),
    "many inputs": (Request(model_name="ensemble", inputs=[Request.InferInputTensor()] * 5000), ["5000", "100"]),
    "unknown output": (
        message("ensemble", ASK, outputs=[Request.InferRequestedOutputTensor(name="logits")]),
        ["no output 'logits'"],
    ),
    "input in shared memory": (with_parameter("inputs", "shared_memory_region"), ["shared memory"]),
    "output in shared memory": (with_parameter("outputs", "shared_memory_region"), ["shared_memory_region"]),
    "classification": (with_parameter("outputs", "classification"), ["classification"]),
    "beams": (changed("beam_width", int32([17])), ["beam_width is 17", "from 1 to 16"]),
    "stream": (changed("stream", np.array([[True]])), ["stream is true", "ModelStreamInfer"]),
    "V1": (
        message("ensemble", ASK, parameters={"gpt_model_type": triton_pb2.InferParameter(string_param="V1")}),
        ["'V1'", "inflight_fused_batching"],
    ),
    "long id": (message("ensemble", ASK, id="x" * 101), ["101", "100"]),
    "stop without id": (message("tensorrt_llm", STOP), ["stop needs the id"]),
    "negative length": (message("tensorrt_llm", {**ASK_IDS, "input_lengths": int32([-1])}), ["input_lengths is -1"]),
    "length beyond input_ids": (
        message("tensorrt_llm", {**ASK_IDS, "input_lengths": int32([len(PROMPT_IDS) + 1])}),
        [f"must be 1 to {len(PROMPT_IDS)}"],
    ),
    "token id beyond the vocabulary": (
        message("tensorrt_llm", {**ASK_IDS, "input_ids": int32([10**9] * len(PROMPT_IDS))}),
        ["1000000000", "vocabulary"],
    ),
    "ends of words that fall": (
        message("tensorrt_llm", {**ASK_IDS, "stop_words_list": int32([[1, 2, 3], [2, 1, -1]])}),
        ["ends at 1", "must be 3 to 3"],
    ),
    "ends of words beyond the list": (
        message("tensorrt_llm", {**ASK_IDS, "bad_words_list": int32([[1, 2, 3], [9, -1, -1]])}),
        ["ends at 9"],
    ),
    "lengths of another number": (
        message("postprocessing", {"TOKENS_BATCH": int32([[1, 2]]), "SEQUENCE_LENGTH": int32([1, 1])}),
        ["SEQUENCE_LENGTH has 2"],
    ),
    "a length that is too long": (
        message("postprocessing", {"TOKENS_BATCH": int32([[1, 2]]), "SEQUENCE_LENGTH": int32([3])}),
        ["SEQUENCE_LENGTH is 3", "0 to 2"],
    ),
    "many lists": (message("postprocessing", {"TOKENS_BATCH": int32([[1]] * 300)}), ["300 lists", "256"]),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, grpc.aio.AioRpcError]:
    """The errors of all wrong requests to one gateway, which answers a right one in the end."""
    found: dict[str, grpc.aio.AioRpcError] = {}

    async def test(stub: triton_pb2_grpc.GRPCInferenceServiceStub) -> None:
        for name, (request, _) in WRONG.items():
            try:
                await stub.ModelInfer(request)
            except grpc.aio.AioRpcError as error:
                found[name] = error
        assert output(await stub.ModelInfer(message("ensemble", ASK)), "text_output")

    with_stub(tmp_path_factory.mktemp("refusals"), test)
    return found


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused_with_value_and_limit(
    refusals: Mapping[str, grpc.aio.AioRpcError], name: str
) -> None:
    error = refusals[name]
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    assert len(error.details()) < 500
    for word in WRONG[name][1]:
        assert word in error.details()
