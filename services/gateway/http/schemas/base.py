"""What all request models share: strict types, nulls for defaults, unknown fields ignored, unsupported ones refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pydantic
import structlog
from pydantic import Field
from pydantic_core import InitErrorDetails, PydanticCustomError

log = structlog.get_logger()

MAX_LOGGED_FIELDS = 20
MAX_FIELDS = 256  # of one object, unknown ones too

# Python's integers have no bounds, those of the messages do. What a value means is checked in `gateway/request.py`.
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
CountOrAll = Annotated[int, Field(ge=-1, le=2**32 - 1)]  # -1: all there are
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1
NOT_64_BITS = PydanticCustomError("int64", "must be an integer of 64 bits")
Int64 = Annotated[int, Field(ge=MIN_INT64, le=MAX_INT64)]


def _check_token_ids(value: Any, check: pydantic.ValidatorFunctionWrapHandler) -> Any:
    """As `check` does, for a list at the speed of C; tells of one wrong element."""
    if type(value) is not list:
        return check(value)
    kinds = list(map(type, value))
    foreign_kinds = set(kinds) - {int}
    if foreign_kinds:
        place = min(map(kinds.index, foreign_kinds))
        raise _error_at(place, value, "int_type")
    if value and min(value) < MIN_INT64:
        raise _error_at(value.index(min(value)), value, NOT_64_BITS)
    if value and max(value) > MAX_INT64:
        raise _error_at(value.index(max(value)), value, NOT_64_BITS)
    return value


def _error_at(place: int, value: list[Any], error: str | PydanticCustomError) -> pydantic.ValidationError:
    details: InitErrorDetails = {"type": error, "loc": (place,), "input": value[place]}
    return pydantic.ValidationError.from_exception_data("token ids", [details])


TokenIdList = Annotated[list[Int64], pydantic.WrapValidator(_check_token_ids)]


def at_most(most: int) -> pydantic.BeforeValidator:
    """Refuses a list or object with more elements before it costs time to look at each of them."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            context = {"count": len(value), "most": most}
            raise PydanticCustomError("too_many", "there are {count} elements, at most {most} allowed", context)
        return value

    return pydantic.BeforeValidator(check)


class RequestModel(pydantic.BaseModel):
    """Numbers are numbers: no strings or booleans in their place.

    `unsupported` names fields of OpenAI or other servers that this server knows and cannot obey, with the values that
    ask for nothing: those are accepted, any other is an error, because an answer that ignores it would be wrong.
    """

    model_config = pydantic.ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=(), frozen=True
    )
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            if len(data) > MAX_FIELDS:
                raise PydanticCustomError(
                    "too_many_fields",
                    "there are {count} fields, at most {most} allowed",
                    {"count": len(data), "most": MAX_FIELDS},
                )
            for name in cls.unsupported.keys() & data.keys():
                if data[name] is not None and data[name] not in cls.unsupported[name]:
                    # A model's own error has no place in the path; the handler adds `field` to it.
                    raise PydanticCustomError("unsupported", "this field is not supported", {"field": name})
        return data

    def log_unknown_fields(self, request_id: str) -> None:
        """What is ignored can at least be found."""
        unknown = sorted(self.model_extra.keys() - self.unsupported.keys()) if self.model_extra else []
        if unknown:
            names = ",".join(name[:60] for name in unknown[:MAX_LOGGED_FIELDS])
            log.debug("unknown fields ignored", request_id=request_id, num_fields=len(unknown), fields=names)
