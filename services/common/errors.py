"""Every error that input, capacity or a peer can cause, in one tree.

Each class says what a client sees: `status_code` over gRPC, `http_status` over HTTP, and `code`, a word for programs
that is the same on both. `services.rpc.error_details` and `services.gateway.http` do the mapping, each once.
A message names the offending value and the limit. `assert` remains for our own bugs.
"""

from __future__ import annotations

import grpc


class TwostrokeError(Exception):
    """Base of all expected errors."""

    status_code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    http_status: int = 500
    code: str = "internal"
    retry_after_s: float | None = None  # when trying again may help; None: nobody knows

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param  # the field of the request that is wrong, where it is one


class InvalidRequest(TwostrokeError):
    """The request itself is wrong; retrying it unchanged cannot help."""

    status_code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer together have more tokens than the model takes."""

    code = "context_length_exceeded"  # OpenAI's


class Unauthenticated(TwostrokeError):
    """No API key, or one that is not known."""

    status_code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    code = "invalid_api_key"


class PermissionDenied(TwostrokeError):
    """Known, but not allowed to."""

    status_code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403
    code = "permission_denied"


class NotFound(TwostrokeError):
    """A name (model, request, sequence) that nobody knows."""

    status_code = grpc.StatusCode.NOT_FOUND
    http_status = 404
    code = "not_found"


class UnknownModel(NotFound):
    """Another model than the served one."""

    code = "model_not_found"  # OpenAI's


class CapacityError(TwostrokeError):
    """The request is fine but does not fit: queue, KV cache or shared memory. `retry_after_s` in seconds."""

    status_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    code = "capacity"

    def __init__(self, message: str, param: str | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, param)
        self.retry_after_s = retry_after_s


class RateLimited(CapacityError):
    """The caller has used up what one API key may have at once or in a minute; the server itself has room."""

    code = "rate_limit_exceeded"


class DeadlineExceeded(TwostrokeError):
    """Somebody waited as long as was allowed: a client that does not read, a call with a deadline."""

    status_code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    code = "deadline_exceeded"


class QueueTimeout(DeadlineExceeded):
    """The request waited longer for its first step than it was allowed to: the server is too busy."""

    http_status = 503
    code = "queue_timeout"


class PeerError(TwostrokeError):
    """Another service is unreachable, too slow or gone."""

    status_code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    code = "unavailable"


class DeviceError(TwostrokeError):
    """A GPU or its driver has failed a call: this process cannot go on. For its peers it is one that is gone."""

    status_code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    code = "device"


class Draining(TwostrokeError):
    """This server is about to stop and takes no new requests; another one may."""

    status_code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    code = "draining"


class RequestAborted(TwostrokeError):
    """The server gave up on this one request; the others go on."""

    status_code = grpc.StatusCode.ABORTED
    http_status = 500
    code = "request_aborted"


class StaleEpoch(TwostrokeError):
    """A handle or plan of an attention worker, or attachment, that no longer exists."""

    status_code = grpc.StatusCode.FAILED_PRECONDITION
    code = "stale_epoch"


class RolledBack(TwostrokeError):
    """A change that could not be made; everything is as it was before."""

    status_code = grpc.StatusCode.ABORTED
    code = "rolled_back"


class ConfigError(TwostrokeError):
    """A configuration that cannot work; raised before anything starts."""

    status_code = grpc.StatusCode.FAILED_PRECONDITION
    code = "config"


class ModelError(TwostrokeError):
    """A model directory that is missing, incomplete, damaged or not supported."""

    status_code = grpc.StatusCode.FAILED_PRECONDITION
    code = "model"
