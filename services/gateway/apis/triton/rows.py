"""Rows: what an inference request asks for, one row for each element of its batch.

A row maps options (`InputSpec.key`) to plain values: a number, text or boolean, a list of these, or an array. Tensors
and the JSON bodies of `generate` both become rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.common.errors import InvalidRequest
from services.common.shorten import quote, show
from services.gateway.apis.triton.models import InputSpec, ModelSpec
from services.gateway.apis.triton.tensors import BYTES, Tensor, from_list

MAX_FIELDS = 256  # of one request in JSON, unknown ones too
MAX_INT32 = 2**31 - 1
TABLE = "prompt_embedding_table"

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InferLimits:
    """What an inference request may have at this server."""

    max_batch_size: int  # rows
    max_numbers: int  # in all logits of its answers, if they are sent as JSON
    has_tables: bool  # whether prompts may have a table of vectors


def rows_of_tensors(model: ModelSpec, tensors: Sequence[Tensor], limits: InferLimits) -> list[Row]:
    """Checks the tensors of a request, whose names have passed `check_name`.

    Raises `InvalidRequest` for the first that is wrong or missing.
    """
    specs, max_batch_size = model.inputs_by_name, limits.max_batch_size
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.name not in specs:
            raise InvalidRequest(f"model {model.name!r} has no input {quote(tensor.name)}", tensor.name)
        if tensor.name in found:
            raise InvalidRequest(f"input {tensor.name!r} is given twice", tensor.name)
        found[tensor.name] = tensor
    _check_missing(model, found)
    batch_size: int | None = None
    rows: list[dict[str, Any]] = []
    for name, tensor in found.items():
        _check_type(specs[name], tensor)
        if batch_size is None:
            batch_size = tensor.shape[0]
            if not 1 <= batch_size <= max_batch_size:
                raise InvalidRequest(
                    f"input {name!r} has a batch of {batch_size}, must be 1 to {max_batch_size} (gateway.max_prompts)",
                    name,
                )
            rows = [{} for _ in range(batch_size)]
        elif tensor.shape[0] != batch_size:
            raise InvalidRequest(
                f"input {name!r} has a batch of {tensor.shape[0]}, earlier inputs have {batch_size}", name
            )
        _add(rows, specs[name], tensor)
    return list(rows)


def row_of_json(model: ModelSpec, body: Mapping[str, Any], limits: InferLimits) -> Row:
    """Checks the body of a `generate` request. Fields that are no inputs are ignored, as Triton does."""
    specs, given = model.inputs_by_name, dict[str, Any]()
    for name, value in flat_fields(body).items():
        if value is not None:
            check_name(model, name, limits)
            if name in specs:
                given[name] = value
    _check_missing(model, given)
    rows: list[dict[str, Any]] = [{}]
    for name, value in given.items():
        spec = specs[name]
        values = value if isinstance(value, list) else [value]
        datatype = spec.datatypes[0]
        if spec.is_scalar and _count(values) != 1:
            raise InvalidRequest(f"{name} has {_count(values)} values, must have 1", name)
        shape = (1, *(-1 if size < 0 else size for size in spec.dims))
        if shape.count(-1) > 2:
            urls = next(each.name for each in model.inputs if each.key == "image_url_input")
            raise InvalidRequest(f"{name} is read from tensors alone: send files as {urls}", name)
        if shape.count(-1) > 1:
            shape = _matrix_shape(name, values)
        flat = from_list(name, datatype, (_count(values),), values).values
        if flat.size % abs(int(np.prod(shape))):
            raise InvalidRequest(f"{name} has {flat.size} values, must have a multiple of {spec.dims[0]}", name)
        _add(rows, spec, Tensor(name, datatype, flat.reshape(shape)))
    return rows[0]


def flat_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `generate` request, those in its `parameters` too. Raises `InvalidRequest` for too many."""
    parameters = body.get("parameters")
    if parameters is None:
        parameters = {}
    elif not isinstance(parameters, dict):
        raise InvalidRequest(f"parameters is {show(parameters)}, must be an object", "parameters")
    if len(body) + len(parameters) > MAX_FIELDS:
        raise InvalidRequest(f"there are {len(body) + len(parameters)} fields, at most {MAX_FIELDS} allowed")
    return {**parameters, **body}


def _matrix_shape(name: str, values: list[Any]) -> tuple[int, int, int]:
    """The shape of a batch of one matrix, given as a list of rows, as such a list in a list, or as its only row.

    Raises `InvalidRequest` if it has no values, or rows of several lengths.
    """
    if len(values) == 1 and isinstance(values[0], list) and any(isinstance(each, list) for each in values[0]):
        values = values[0]
    if not any(isinstance(each, list) for each in values):
        values = [values]
    lengths = [_count(each) if isinstance(each, list) else 1 for each in values]
    if not any(lengths):
        raise InvalidRequest(f"{name} has no values, must have at least 1", name)
    if len(set(lengths)) > 1:
        raise InvalidRequest(
            f"{name} has rows of {min(lengths)} to {max(lengths)} values, all must have the same number", name
        )
    return (1, len(values), lengths[0])


def _count(values: Sequence[Any]) -> int:
    return sum(_count(each) if isinstance(each, list) else 1 for each in values)


def check_name(model: ModelSpec, name: str, limits: InferLimits) -> None:
    """Raises `InvalidRequest` for an input that is not supported. Called before its values are read."""
    if name == TABLE and not limits.has_tables:
        raise InvalidRequest(f"{TABLE} cannot be used here: gateway.enable_prompt_embeds is not set", TABLE)
    if name in model.refused:
        raise InvalidRequest(f"the input {name!r} of model {model.name!r} is not supported", name)


def _check_missing(model: ModelSpec, found: Mapping[str, Any]) -> None:
    for spec in model.inputs:
        if spec.is_required and spec.name not in found:
            raise InvalidRequest(
                f"model {model.name!r} needs the input {spec.name!r}: {spec.datatypes[0]} of shape {_shape(spec)}",
                spec.name,
            )


def _check_type(spec: InputSpec, tensor: Tensor) -> None:
    if tensor.datatype not in spec.datatypes:
        raise InvalidRequest(
            f"input {spec.name!r} has the type {tensor.datatype}, must be {' or '.join(spec.datatypes)}", spec.name
        )
    dims = tensor.shape[1:]
    if len(tensor.shape) != 1 + len(spec.dims) or any(
        size not in (-1, given) for size, given in zip(spec.dims, dims, strict=True)
    ):
        raise InvalidRequest(
            f"input {spec.name!r} has the shape {list(tensor.shape)}, must be {_shape(spec)}", spec.name
        )


def _shape(spec: InputSpec) -> str:
    return f"[batch, {', '.join('any' if size < 0 else str(size) for size in spec.dims)}]"


def _add(rows: Sequence[dict[str, Any]], spec: InputSpec, tensor: Tensor) -> None:
    """Adds a tensor's values to the rows. An option that has two names takes the value given last."""
    for row, values in zip(rows, tensor.values, strict=True):
        value: Any = values
        if tensor.datatype == BYTES:
            value = [_text(spec.name, each) for each in values]
        elif spec.is_scalar or spec.dims == (-1,):
            value = values.tolist()
        if spec.is_scalar:
            [value] = value
            if tensor.datatype == "UINT32" and value > MAX_INT32:
                raise InvalidRequest(f"{spec.name} is {value}, must be at most {MAX_INT32}", spec.name)
        if spec.only is not None and value not in spec.only:
            raise InvalidRequest(
                f"{spec.name} is {show(value)}, which is not supported: must be {show(spec.only[0])}", spec.name
            )
        row[spec.key] = value


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8: {error.reason} at byte {error.start}", name) from None
