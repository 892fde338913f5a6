"""The body of an inference request over HTTP and of its response: JSON, followed by the raw bytes of some tensors."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from services.common.errors import InvalidRequest
from services.common.shorten import quote, show
from services.gateway.apis.triton.inference import MAX_TENSORS, SHARED_MEMORY, InferRequest, check_output_parameters
from services.gateway.apis.triton.models import VERSION, ModelSpec
from services.gateway.apis.triton.rows import InferLimits, check_name, rows_of_tensors
from services.gateway.apis.triton.tensors import Tensor, from_list, from_raw, to_raw, values_of

ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}  # sizes of zlib's window, which name the format
HEADER_LENGTH = "inference-header-content-length"  # the header with the number of bytes of JSON


def split_body(body: bytes, header_length: str | None) -> tuple[bytes, bytes]:
    """The JSON of a body and the bytes after it. Raises `InvalidRequest` if the header has no such number."""
    if header_length is None:
        return body, b""
    is_number = header_length.isascii() and header_length.isdecimal() and len(header_length) < 20
    if not is_number or int(header_length) > len(body):
        raise InvalidRequest(
            f"{HEADER_LENGTH} is {quote(header_length)}, must be a number of at most {len(body)}, the size of the body",
            HEADER_LENGTH,
        )
    return body[: int(header_length)], body[int(header_length) :]


def decompressed(body: bytes, encoding: str | None, max_bytes: int) -> bytes:
    """The body without its Content-Encoding. Raises `InvalidRequest`, or a 413 beyond `max_bytes`, or a 415."""
    if encoding in (None, "", "identity"):
        return body
    if encoding not in ENCODINGS:
        raise HTTPException(415, f"content-encoding is {quote(encoding)}, must be {' or '.join(ENCODINGS)}")
    reader = zlib.decompressobj(ENCODINGS[encoding])
    try:
        plain = reader.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {encoding}: {error}") from None
    if len(plain) > max_bytes:
        raise HTTPException(413, f"the body has more than {max_bytes} bytes when decompressed, the limit")
    if not reader.eof:
        raise InvalidRequest(f"the {encoding} body is incomplete")
    return plain


def read_infer_request(
    model: ModelSpec,
    document: Any,
    raw: bytes,
    limits: InferLimits,
    traceparent: str,
) -> tuple[InferRequest, Mapping[str, bool]]:
    """The request, and for each requested output whether it is wanted as raw bytes (`""`: the default).

    document: the parsed JSON; raw: the bytes after it. Raises `InvalidRequest`.
    """
    root = _object(document, "the body")
    parameters = _object(root.get("parameters") or {}, "parameters")
    tensors = []
    for index, each in enumerate(_objects(root.get("inputs"), "inputs")):
        check_name(model, _text(each, "name", f"inputs[{index}]"), limits)
        tensor, raw = _tensor(each, f"inputs[{index}]", raw)
        tensors.append(tensor)
    if raw:
        raise InvalidRequest(f"{len(raw)} bytes follow the JSON that belong to no input", "inputs")
    is_raw = {"": bool(parameters.get("binary_data_output", False))}
    names = None
    if root.get("outputs"):
        names = []
        for index, each in enumerate(_objects(root["outputs"], "outputs")):
            options = _object(each.get("parameters") or {}, f"outputs[{index}].parameters")
            check_output_parameters(options)
            names.append(_text(each, "name", f"outputs[{index}]"))
            is_raw[names[-1]] = bool(options.get("binary_data", is_raw[""]))
    request = InferRequest(
        model,
        rows_of_tensors(model, tensors, limits),
        _text(root, "id", "the body") if root.get("id") else "",
        names,
        parameters,
        traceparent,
        None if all(is_raw.get(name, is_raw[""]) for name in names or ("",)) else limits.max_numbers,
    )
    return request, is_raw


def describe_infer_response(
    request: InferRequest, outputs: Sequence[Tensor], is_raw: Mapping[str, bool]
) -> tuple[dict[str, Any], list[bytes | memoryview]]:
    """The response as JSON, whose values are made when they are encoded, and the raw bytes that follow it."""
    parts, described = [], []
    for tensor in outputs:
        about: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if is_raw.get(tensor.name, is_raw[""]):
            parts.append(to_raw(tensor))
            about["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            about["data"] = values_of(tensor)
        described.append(about)
    document = {"model_name": request.model.name, "model_version": VERSION, "outputs": described}
    if request.id:
        document["id"] = request.id
    return document, parts


def _tensor(each: Mapping[str, Any], where: str, raw: bytes) -> tuple[Tensor, bytes]:
    """One input, and the raw bytes that belong to later ones."""
    name, datatype = _text(each, "name", where), _text(each, "datatype", where)
    shape = each.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise InvalidRequest(f"the shape of {where} is {show(shape)}, must be a list of integers", "shape")
    parameters = _object(each.get("parameters") or {}, f"{where}.parameters")
    if any(name in parameters for name in SHARED_MEMORY):
        raise InvalidRequest(f"{where} lies in shared memory, which is not supported", name)
    size = parameters.get("binary_data_size")
    if size is None:
        data = each.get("data")
        if data is None:
            raise InvalidRequest(f"{where} has neither data nor binary_data_size", name)
        return from_list(name, datatype, shape, data if isinstance(data, list) else [data]), raw
    if type(size) is not int or not 0 <= size <= len(raw):
        raise InvalidRequest(
            f"the binary_data_size of {where} is {show(size)}, must be 0 to {len(raw)}: so many bytes are left",
            name,
        )
    return from_raw(name, datatype, shape, raw[:size]), raw[size:]


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} is {show(value)}, must be an object")
    return value


def _objects(value: Any, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TENSORS:
        count = f"has {len(value)} elements" if isinstance(value, list) else "is missing or no list"
        raise InvalidRequest(f"{where} {count}, must have 1 to {MAX_TENSORS}", where)
    return [_object(each, f"{where}[{index}]") for index, each in enumerate(value)]


def _text(each: Mapping[str, Any], field: str, where: str) -> str:
    value = each.get(field)
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} of {where} is {show(value)}, must be a string", field)
    return value
