"""The details of an error that a gRPC client receives over a real channel."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from structlog.testing import capture_logs

from services.common import errors
from services.common.errors import (
    CapacityError,
    ContextLengthExceeded,
    InvalidRequest,
    NotFound,
    RateLimited,
    TwostrokeError,
)
from services.gateway.apis.llama_cpp.errors import llama_cpp_error
from services.pb import gateway_pb2, gateway_pb2_grpc
from services.rpc.error_details import error_of, rich_status
from services.rpc.server import GrpcServer, _status_of
from tests.support.running_gateway import run

DETAILS = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)
HTTP_STATUS = {
    "INVALID_ARGUMENT": {400, 422},  # 422: a key that came again with another request
    "CANCELLED": {499},
    "UNAUTHENTICATED": {401},
    "PERMISSION_DENIED": {403},
    "NOT_FOUND": {404},
    "RESOURCE_EXHAUSTED": {429},
    "DEADLINE_EXCEEDED": {503, 504},
    "UNAVAILABLE": {503},
    "ABORTED": {409, 500},  # 409: another connection reads the rest of an answer
    "INTERNAL": {500},
    "FAILED_PRECONDITION": {410, 500},  # 410: an answer that can be resumed no more
}  # as in google/rpc/code.proto, except for codes that only other services see


def unpack(call: Any) -> dict[str, Any]:
    """The details of a failed call, by the name of their message type."""
    status = rpc_status.from_call(call)
    assert status is not None
    found: dict[str, Any] = {}
    for packed in status.details:
        for kind in DETAILS:
            if packed.Is(kind.DESCRIPTOR):
                packed.Unpack(detail := kind())
                found[kind.DESCRIPTOR.name] = detail
    return found


class Failing(gateway_pb2_grpc.GatewayServicer):
    """Fails every call with `error`."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def Tokenize(self, request: Any, context: Any) -> gateway_pb2.TokenizeResponse:
        raise self.error

    async def GenerateStream(self, request: Any, context: Any) -> Any:
        yield gateway_pb2.GenerateChunk(text="so far")
        raise self.error


async def fail(tmp_path: Path, error: Exception, *, is_stream: bool = False) -> grpc.aio.AioRpcError:
    """The error that a client gets from a server that raises `error`."""
    server = GrpcServer(f"unix:{tmp_path}/socket", ["twostroke.v1.Gateway"], 2**20)
    gateway_pb2_grpc.add_GatewayServicer_to_server(Failing(error), server.server)
    address = await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                if is_stream:
                    async for _ in stub.GenerateStream(gateway_pb2.GenerateRequest()):
                        pass
                else:
                    await stub.Tokenize(gateway_pb2.TokenizeRequest())
    finally:
        await server.stop(0)
    return raised.value


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_wrong_field_is_named(tmp_path: Path, is_stream: bool) -> None:
    async def test() -> None:
        error = await fail(tmp_path, InvalidRequest("top_p is 2, must be at most 1", "top_p"), is_stream=is_stream)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "top_p is 2, must be at most 1"
        details = unpack(error)
        assert set(details) == {"ErrorInfo", "BadRequest"}
        assert (details["ErrorInfo"].reason, details["ErrorInfo"].domain) == ("INVALID_REQUEST", "twostroke")
        [violation] = details["BadRequest"].field_violations
        assert (violation.field, violation.description) == ("top_p", "top_p is 2, must be at most 1")

    run(test())


def test_a_full_server_says_when_to_retry(tmp_path: Path) -> None:
    async def test() -> None:
        error = await fail(tmp_path, CapacityError("10 requests wait, the limit is 10", retry_after_s=2.5))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = unpack(error)
        assert set(details) == {"ErrorInfo", "RetryInfo"}
        assert details["ErrorInfo"].reason == "CAPACITY"
        assert details["RetryInfo"].retry_delay.ToMilliseconds() == 2500

    run(test())


def test_long_messages_in_any_script_arrive_shortened(tmp_path: Path) -> None:
    async def test() -> None:
        error = await fail(tmp_path, NotFound("東" * 100_000 + "\ud800", "東" * 10_000))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert error.details().startswith("東" * 300) and error.details().endswith("…")
        assert unpack(error)["ErrorInfo"].reason == "NOT_FOUND"

    run(test())


def test_a_bug_reveals_only_its_type(tmp_path: Path) -> None:
    async def test() -> None:
        error = await fail(tmp_path, ZeroDivisionError("secret"))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert error.details() == "internal error: ZeroDivisionError"

    run(test())


def test_every_error_means_the_same_over_http_and_grpc() -> None:
    classes = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, TwostrokeError)]
    assert len(classes) > 10
    for each in classes:
        assert each.http_status in HTTP_STATUS[each.status_code.name], each
        assert rich_status(each("message")).code is each.status_code
    codes = [each.code for each in classes]
    assert len(set(codes)) == len(codes)


def test_an_error_of_another_process_has_its_class_and_message(tmp_path: Path) -> None:
    async def test() -> None:
        sent = ContextLengthExceeded("65 tokens are too many", "prompt", max_model_len=64, num_prompt_tokens=65)
        found = error_of(await fail(tmp_path, sent))
        assert type(found) is ContextLengthExceeded and str(found) == "65 tokens are too many"
        assert llama_cpp_error(found)["error"] == {
            "code": 400,
            "message": "request exceeds the available context size: 65 tokens are too many",
            "type": "exceed_context_size_error",
        }

    run(test())


def test_a_rate_limit_has_another_code_than_a_full_server() -> None:
    assert issubclass(RateLimited, CapacityError)
    assert RateLimited.code != CapacityError.code and RateLimited.http_status == CapacityError.http_status


@pytest.mark.parametrize(("error", "is_logged"), [(grpc.aio.InternalError("a write failed"), False), (OSError(), True)])
def test_a_client_that_goes_before_its_answer_is_no_error_in_the_log(error: Exception, is_logged: bool) -> None:
    """Without a key anybody could fill the log with them."""
    with capture_logs() as lines:
        _status_of(error)
    assert bool([line for line in lines if line["log_level"] == "error"]) == is_logged
