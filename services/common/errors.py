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
    retry_after_s: float | None = None  # after how many seconds a retry may help; None: unknown

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param  # the field of the request that is wrong, if the error concerns one


class InvalidRequest(TwostrokeError):
    """The request itself is wrong; retrying it unchanged cannot help."""

    status_code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer together have more tokens than the model supports."""

    code = "context_length_exceeded"  # the code that OpenAI uses

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        max_model_len: int | None = None,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """`num_prompt_tokens`: None if the prompt was refused before its tokens were counted.

        Both numbers are None in an error that came from another process: its status has only the message.
        """
        super().__init__(message, param)
        self.max_model_len = max_model_len
        self.num_prompt_tokens = num_prompt_tokens


class Unauthenticated(TwostrokeError):
    """The API key is missing or unknown."""

    status_code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    code = "invalid_api_key"


class PermissionDenied(TwostrokeError):
    """The caller is known but not allowed to do this."""

    status_code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403
    code = "permission_denied"


class NotFound(TwostrokeError):
    """The name of a model, request or sequence is unknown."""

    status_code = grpc.StatusCode.NOT_FOUND
    http_status = 404
    code = "not_found"


class UnknownModel(NotFound):
    """The request names a model that is not served."""

    code = "model_not_found"  # the code that OpenAI uses


class CapacityError(TwostrokeError):
    """The request is valid but does not fit into the queue, KV cache or shared memory."""

    status_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    code = "capacity"

    def __init__(self, message: str, param: str | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, param)
        self.retry_after_s = retry_after_s


class RateLimited(CapacityError):
    """The API key has reached its limit per minute or of requests at once; the server itself has room."""

    code = "rate_limit_exceeded"


class DeadlineExceeded(TwostrokeError):
    """A time limit has passed: a client did not read its answer, or a call missed its deadline."""

    status_code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    code = "deadline_exceeded"


class QueueTimeout(DeadlineExceeded):
    """The request waited too long for its first step, because the server is busy."""

    http_status = 503
    code = "queue_timeout"


class PeerError(TwostrokeError):
    """Another service is unreachable, too slow or gone."""

    status_code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    code = "unavailable"
    retry_after_s = 1.0  # most services are back by then


class DeviceError(TwostrokeError):
    """A call to a GPU or its driver failed, and this process cannot go on. Its peers treat the process as gone."""

    status_code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    code = "device"


class Draining(TwostrokeError):
    """This server is about to stop and accepts no new requests; another server may accept them."""

    status_code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    code = "draining"


class RequestAborted(TwostrokeError):
    """The server gave up this request; other requests continue."""

    status_code = grpc.StatusCode.ABORTED
    http_status = 500
    code = "request_aborted"


class AbortedByCaller(TwostrokeError):
    """Another request of the same caller ended this one, which has no answer without what it would have computed."""

    status_code = grpc.StatusCode.CANCELLED
    http_status = 499  # as proxies log it when a client gives up; no standard has one
    code = "aborted_by_caller"


class KeyReused(TwostrokeError):
    """The name of a resumable request came again, with another request."""

    status_code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 422
    code = "idempotency_key_reused"


class TakenOver(TwostrokeError):
    """Another connection of the client reads the rest of this answer."""

    status_code = grpc.StatusCode.ABORTED
    http_status = 409
    code = "taken_over"


class NotResumable(TwostrokeError):
    """The rest of an answer is no longer there, or would not continue what the client has."""

    status_code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 410
    code = "not_resumable"


class StaleEpoch(TwostrokeError):
    """A handle or plan belongs to an attention worker or an attachment that no longer exists."""

    status_code = grpc.StatusCode.FAILED_PRECONDITION
    code = "stale_epoch"


class RolledBack(TwostrokeError):
    """A change could not be made and was undone; everything is as before."""

    status_code = grpc.StatusCode.ABORTED
    http_status = 409
    code = "rolled_back"


class ConfigError(TwostrokeError):
    """The configuration cannot work; raised before anything starts."""

    status_code = grpc.StatusCode.FAILED_PRECONDITION
    code = "config"


class ModelError(TwostrokeError):
    """The model directory is missing, incomplete, damaged or not supported."""

    status_code = grpc.StatusCode.FAILED_PRECONDITION
    code = "model"


def ends_process(error: BaseException) -> bool:
    """Whether a worker ends with an error, which no new attachment can cure: a failed GPU, or a bug."""
    return isinstance(error, DeviceError) or not isinstance(error, TwostrokeError)
