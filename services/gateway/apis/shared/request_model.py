"""The base of all request models: strict types, null means default, unknown fields are ignored, unsupported refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pydantic
from fastapi import Request
from pydantic import Discriminator, Field, Tag
from pydantic_core import InitErrorDetails, PydanticCustomError

from services.common.config import MAX_PROMPTS

MAX_FIELDS = 256  # of one object, unknown ones too

# Integers of the gRPC messages have bounds. `gateway/request/read_request.py` checks whether a value makes sense.
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
CountOrAll = Annotated[int, Field(ge=-1, le=2**32 - 1)]  # -1: all
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1
NOT_64_BITS = PydanticCustomError("int64", "must be an integer of 64 bits")
Int64 = Annotated[int, Field(ge=MIN_INT64, le=MAX_INT64)]


def _check_token_ids(value: Any, check: pydantic.ValidatorFunctionWrapHandler) -> Any:
    """Does the same as `check`, but faster for a list; reports only one wrong element."""
    if type(value) is not list:
        return check(value)
    kinds = list(map(type, value))
    foreign_kinds = set(kinds) - {int}
    if foreign_kinds:
        index = min(map(kinds.index, foreign_kinds))
        raise _error_at(index, value, "int_type")
    if value and min(value) < MIN_INT64:
        raise _error_at(value.index(min(value)), value, NOT_64_BITS)
    if value and max(value) > MAX_INT64:
        raise _error_at(value.index(max(value)), value, NOT_64_BITS)
    return value


def _error_at(index: int, value: list[Any], error: str | PydanticCustomError) -> pydantic.ValidationError:
    details: InitErrorDetails = {"type": error, "loc": (index,), "input": value[index]}
    return pydantic.ValidationError.from_exception_data("token ids", [details])


TokenIdList = Annotated[list[Int64], pydantic.WrapValidator(_check_token_ids)]


def at_most(most: int) -> pydantic.BeforeValidator:
    """Refuses a list or object with more than `most` elements before its elements are checked."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            context = {"count": len(value), "most": most}
            raise PydanticCustomError("too_many", "there are {count} elements, at most {most} allowed", context)
        return value

    return pydantic.BeforeValidator(check)


def _kind_of_token_ids(value: Any) -> str:
    return "<token_id_lists>" if isinstance(value, list) and value and isinstance(value[0], list) else "<token_ids>"


TokenLists = Annotated[
    Annotated[TokenIdList, Tag("<token_ids>")]
    | Annotated[list[TokenIdList], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("<token_id_lists>")],
    Discriminator(_kind_of_token_ids),
]


class RequestModel(pydantic.BaseModel):
    """The base of request models. Strict: a string or boolean is not accepted as a number.

    `unsupported` names fields of OpenAI or other servers that this server does not support, with the values that have
    no effect. Such values are accepted. Any other value is an error, because an answer that ignores it would be wrong.
    """

    model_config = pydantic.ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=(), frozen=True
    )
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if isinstance(data, dict):  # as JSON has it; of another mapping the question takes longer
            if len(data) > MAX_FIELDS:
                raise PydanticCustomError(
                    "too_many_fields",
                    "there are {count} fields, at most {most} allowed",
                    {"count": len(data), "most": MAX_FIELDS},
                )
            for name in cls.unsupported.keys() & data.keys():
                if data[name] is not None and data[name] not in cls.unsupported[name]:
                    # The path of an error of a whole model ends at the model; the error handler appends `field`.
                    raise PydanticCustomError("unsupported", "this field is not supported", {"field": name})
        return data

    def name_request(self, request: Request) -> None:
        """Names the request, where a body may: see `NamedFields`."""

    def log_unknown_fields(self, request: Request) -> None:
        """Logs the names of ignored fields, see `UnknownFields`."""
        unknown = sorted(self.model_extra.keys() - self.unsupported.keys()) if self.model_extra else []
        if unknown:
            request.scope["state"]["unknown_fields"].log(request, unknown, self._known_fields)

    @classmethod
    def _known_fields(cls) -> list[str]:
        return [field.alias or name for name, field in cls.model_fields.items()]
