"""What all request models share: strict types, nulls for defaults, unknown fields ignored, unsupported ones refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pydantic
import structlog
from pydantic import Field
from pydantic_core import PydanticCustomError

log = structlog.get_logger()

MAX_LOGGED_FIELDS = 20
MAX_FIELDS = 256  # of one object, unknown ones too

# Python's integers have no bounds, those of the messages do. What a value means is checked in `gateway/request.py`.
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
CountOrAll = Annotated[int, Field(ge=-1, le=2**32 - 1)]  # -1: all there are
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


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
