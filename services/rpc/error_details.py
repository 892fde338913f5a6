"""Turns the errors of `services.common.errors` into gRPC statuses with machine-readable details.

The details are google.rpc's own messages: https://cloud.google.com/apis/design/errors#error_details.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common.errors import TwostrokeError

DOMAIN = "twostroke"
# gRPC sends a message twice as metadata: in the status (percent-encoded) and in the details (base64). Clients accept
# 8 KiB of metadata.
MAX_MESSAGE_BYTES = 1000


def rich_status(error: TwostrokeError) -> grpc.Status:
    """Code, message and details: always ErrorInfo; BadRequest if a field is wrong; RetryInfo if a retry may help."""
    message = _shorten(str(error))
    details = [error_details_pb2.ErrorInfo(reason=error.code.upper(), domain=DOMAIN)]
    if error.param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=_shorten(error.param), description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(1e3 * error.retry_after_s))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=error.status_code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return rpc_status.to_status(status)


def error_of(error: grpc.RpcError) -> TwostrokeError | None:
    """The error behind a status that `rich_status` made in another process; None if it has no details."""
    data = dict(error.trailing_metadata() or ()).get(rpc_status.GRPC_DETAILS_METADATA_KEY)
    if data is None:
        return None
    for detail in status_pb2.Status.FromString(data).details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            kinds = {kind.code.upper(): kind for kind in _kinds(TwostrokeError)}
            return kinds.get(info.reason, TwostrokeError)(error.details() or "")
    return None


def _kinds(kind: type[TwostrokeError]) -> Iterator[type[TwostrokeError]]:
    """A class of errors and all classes below it. Of two with the same code, the upper one comes last."""
    for each in kind.__subclasses__():
        yield from _kinds(each)
    yield kind


def _shorten(text: str) -> str:
    """Cuts a text to `MAX_MESSAGE_BYTES` of UTF-8, ending with a mark if cut; lone surrogates become '?'."""
    data = text.encode(errors="replace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return data.decode()
    return data[: MAX_MESSAGE_BYTES - 1].decode(errors="ignore") + "…"
