"""Inference requests over gRPC, message by message, to a gateway whose dense worker is scripted."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.pb import triton_pb2, triton_pb2_grpc
from tests.support.clients.gateway_calls import REFERENCE, ids, with_gateway
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

PROMPT = "San Francisco is a"
PROMPT_IDS = REFERENCE(PROMPT)["input_ids"]
TOKENS = ids(" city in Łódź, 東京.")
TYPES = {
    "int32": "INT32",
    "uint8": "UINT8",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "float16": "FP16",
    "float32": "FP32",
    "bool": "BOOL",
    "object": "BYTES",
}
NUMPY_TYPES = {"INT32": "<i4", "FP32": "<f4"}
Request = triton_pb2.ModelInferRequest


def int32(*rows: Sequence[Any]) -> np.ndarray:
    return np.array(rows, dtype=np.int32)


def texts(*rows: Sequence[str]) -> np.ndarray:
    return np.array([[text.encode() for text in row] for row in rows], dtype=object)


def raw(values: np.ndarray) -> bytes:
    if values.dtype == object:
        return b"".join(struct.pack("<I", len(each)) + each for each in values.ravel())
    return values.tobytes()


def message(model: str, inputs: Mapping[str, np.ndarray], **fields: Any) -> Request:
    return Request(
        model_name=model,
        inputs=[
            Request.InferInputTensor(name=name, datatype=TYPES[values.dtype.name], shape=values.shape)
            for name, values in inputs.items()
        ],
        raw_input_contents=[raw(values) for values in inputs.values()],
        **fields,
    )


def output(response: triton_pb2.ModelInferResponse, name: str) -> Any:
    """The values of an output, with its shape; of BYTES a list of texts."""
    index = [each.name for each in response.outputs].index(name)
    tensor, data = response.outputs[index], response.raw_output_contents[index]
    if tensor.datatype != "BYTES":
        return np.frombuffer(data, NUMPY_TYPES[tensor.datatype]).reshape(tensor.shape)
    found = []
    while data:
        (length,) = struct.unpack_from("<I", data)
        found.append(data[4 : 4 + length].decode())
        data = data[4 + length :]
    assert len(found) == np.prod(tensor.shape)
    return found


ASK = {"text_input": texts([PROMPT]), "max_tokens": int32([len(TOKENS)])}
ASK_IDS = {
    "input_ids": int32(PROMPT_IDS),
    "input_lengths": int32([len(PROMPT_IDS)]),
    "request_output_len": int32([len(TOKENS)]),
}
STOP = {
    "input_ids": int32([0]),
    "input_lengths": int32([0]),
    "request_output_len": int32([0]),
    "stop": np.array([[True]]),
}
ENDLESS = {**ASK_IDS, "request_output_len": int32([1900]), "streaming": np.array([[True]])}


def with_stub(
    tmp_path: Path, test: Callable[[triton_pb2_grpc.GRPCInferenceServiceStub], Any], dense: FakeDense | None = None
) -> None:
    async def body(gateway: RunningGateway) -> None:
        await test(triton_pb2_grpc.GRPCInferenceServiceStub(gateway.channel))

    with_gateway(tmp_path, dense or FakeDense(lambda submit: TOKENS), body)
