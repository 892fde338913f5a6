"""Converts the messages of `protos/triton.proto` to requests, and responses to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.common.errors import InvalidRequest
from services.common.shorten import quote
from services.gateway.apis.triton.inference import MAX_TENSORS, SHARED_MEMORY, InferRequest, check_output_parameters
from services.gateway.apis.triton.models import VERSION, find_model
from services.gateway.apis.triton.rows import InferLimits, check_name, rows_of_tensors
from services.gateway.apis.triton.tensors import Tensor, from_list, from_raw, to_raw
from services.pb import triton_pb2

CONTENTS = {
    "BOOL": "bool_contents",
    **{f"INT{bits}": "int_contents" for bits in (8, 16, 32)},
    "INT64": "int64_contents",
    **{f"UINT{bits}": "uint_contents" for bits in (8, 16, 32)},
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def decode_infer_request(
    message: triton_pb2.ModelInferRequest, limits: InferLimits, traceparent: str
) -> InferRequest:
    """The request of a message. Raises `InvalidRequest` or `UnknownModel`."""
    model = find_model(message.model_name, message.model_version)
    for what, elements in (("inputs", message.inputs), ("outputs", message.outputs)):
        if len(elements) > MAX_TENSORS:
            raise InvalidRequest(f"{what} has {len(elements)} elements, at most {MAX_TENSORS} allowed", what)
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InvalidRequest(
            f"raw_input_contents has {len(raw)} elements, must have {len(message.inputs)}, one for each input, or none",
            "raw_input_contents",
        )
    for each in message.inputs:
        check_name(model, each.name, limits)
    tensors = [_tensor(each, raw[index] if raw else None) for index, each in enumerate(message.inputs)]
    for output in message.outputs:
        check_output_parameters(_parameters(output.parameters))
    return InferRequest(
        model,
        rows_of_tensors(model, tensors, limits),
        message.id,
        [each.name for each in message.outputs] or None,
        _parameters(message.parameters),
        traceparent,
        in_one_message=True,
    )


def encode_response(
    model_name: str, request_id: str, outputs: Sequence[Tensor], is_final: bool | None = None
) -> triton_pb2.ModelInferResponse:
    """The message of a response. `is_final` is None for the response of a unary call."""
    response = triton_pb2.ModelInferResponse(
        model_name=model_name,
        model_version=VERSION,
        id=request_id,
        outputs=[
            triton_pb2.ModelInferResponse.InferOutputTensor(name=each.name, datatype=each.datatype, shape=each.shape)
            for each in outputs
        ],
        raw_output_contents=[bytes(to_raw(each)) for each in outputs],
    )
    if is_final is not None:
        response.parameters["triton_final_response"].bool_param = is_final
    return response


def _tensor(message: triton_pb2.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Tensor:
    if any(name in message.parameters for name in SHARED_MEMORY):
        raise InvalidRequest(f"input {quote(message.name)} lies in shared memory, which is not supported", message.name)
    if raw is not None:
        if message.HasField("contents"):
            raise InvalidRequest(
                f"input {quote(message.name)} has contents, but there are raw_input_contents", message.name
            )
        return from_raw(message.name, message.datatype, message.shape, raw)
    field = CONTENTS.get(message.datatype)
    if field is None:
        raise InvalidRequest(
            f"input {quote(message.name)} has the type {quote(message.datatype)}, which has no list of contents",
            message.name,
        )
    for other, _ in message.contents.ListFields():
        if other.name != field:
            raise InvalidRequest(
                f"input {quote(message.name)} has {other.name}, {message.datatype} has {field}", message.name
            )
    return from_list(message.name, message.datatype, message.shape, getattr(message.contents, field))


def _parameters(messages: Mapping[str, triton_pb2.InferParameter]) -> dict[str, Any]:
    values = {}
    for name, message in messages.items():
        kind = message.WhichOneof("parameter_choice")
        values[name] = None if kind is None else getattr(message, kind)
    return values
