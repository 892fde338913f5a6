"""Every error that input, capacity or a peer can cause, in one tree.

Each class carries the gRPC status that a client sees; `services.common.server` does the mapping, once.
A message names the offending value and the limit. `assert` remains for our own bugs.
"""

from __future__ import annotations

import grpc


class TwostrokeError(Exception):
    """Base of all expected errors; `status_code` is what a gRPC client receives."""

    status_code: grpc.StatusCode = grpc.StatusCode.INTERNAL


class InvalidRequest(TwostrokeError):
    """The request itself is wrong; retrying it unchanged cannot help."""

    status_code = grpc.StatusCode.INVALID_ARGUMENT


class CapacityError(TwostrokeError):
    """The request is fine but does not fit: queue, KV cache or shared memory."""

    status_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class NotFound(TwostrokeError):
    """A name (model, request, sequence) that nobody knows."""

    status_code = grpc.StatusCode.NOT_FOUND


class PeerError(TwostrokeError):
    """Another service is unreachable, too slow or gone."""

    status_code = grpc.StatusCode.UNAVAILABLE


class StaleEpoch(TwostrokeError):
    """A handle or plan of an attention worker, or attachment, that no longer exists."""

    status_code = grpc.StatusCode.FAILED_PRECONDITION


class RequestAborted(TwostrokeError):
    """The server gave up on this one request; the others go on."""

    status_code = grpc.StatusCode.ABORTED


class ConfigError(TwostrokeError):
    """A configuration that cannot work; raised before anything starts."""

    status_code = grpc.StatusCode.FAILED_PRECONDITION


class ModelError(TwostrokeError):
    """A model directory that is missing, incomplete, damaged or not supported."""

    status_code = grpc.StatusCode.FAILED_PRECONDITION
