"""`WeightUpdates`: asks the launcher to replace the dense worker by one with other weights. Runs in the event loop.

Who may ask is decided here: callers with an API key that `gateway.weights_admins` names, and without API keys all.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

import grpc

from services.common.config import toml_value
from services.common.errors import (
    InvalidRequest,
    NotFound,
    PeerError,
    PermissionDenied,
    RolledBack,
    TwostrokeError,
)
from services.common.shorten import quote
from services.gateway.access.access import Caller
from services.pb import launch_pb2, launch_pb2_grpc
from services.rpc.client import open_channel

MAX_MESSAGE_BYTES = 1 << 20
LOAD_TIMEOUT_S = 3600.0  # for the new worker to load; the launcher ends it earlier if it makes no progress
Mode = Literal["keep", "wait", "abort"]
_ERRORS: dict[grpc.StatusCode, type[TwostrokeError]] = {
    grpc.StatusCode.ABORTED: RolledBack,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
}


class WeightUpdates:
    """`directory`: below which models must lie; None: nobody may ask. `address`: the launcher's;
    None: there is none.
    """

    def __init__(self, directory: Path | None, admins: Collection[str], address: str | None) -> None:
        self._directory = directory
        self._admins = frozenset(admins)
        self._address = address

    @property
    def is_enabled(self) -> bool:
        """Whether weights can be changed here."""
        return self._directory is not None and self._address is not None

    async def update(
        self, caller: Caller, model: str, mode: Mode, *, keeps_caches: bool, wait_timeout_s: float
    ) -> launch_pb2.ReplaceDenseReply:
        """Replaces the dense worker; takes as long as loading the model. Cancelling the call undoes it.

        `model` is a directory, absolute or relative to the configured one. Raises `PermissionDenied`, `InvalidRequest`,
        `NotFound`, `RolledBack`, after which nothing has changed, or `PeerError`.
        """
        if caller.key is not None and caller.name not in self._admins:
            raise PermissionDenied(f"the API key {caller.name!r} may not change weights: see gateway.weights_admins")
        if self._directory is None or self._address is None:
            raise PermissionDenied("weights cannot be changed here")
        request = launch_pb2.ReplaceDenseRequest(
            overrides=[f"model.path={toml_value(find_model(self._directory, model))}"],
            keep_caches=keeps_caches,
            open_requests=mode.upper(),
            wait_timeout_ms=round(1000 * wait_timeout_s),
        )
        try:
            async with open_channel(self._address, MAX_MESSAGE_BYTES) as channel:
                stub = launch_pb2_grpc.LauncherStub(channel)
                return await stub.ReplaceDense(request, timeout=LOAD_TIMEOUT_S + wait_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _ERRORS.get(error.code(), PeerError)(error.details() or error.code().name) from error


def find_model(directory: Path, model: str) -> Path:
    """The directory of a model below `directory`. Raises `InvalidRequest` or `NotFound`."""
    if not model or "\0" in model:
        raise InvalidRequest("model is empty or has NUL", "model")
    root = directory.resolve()
    try:
        found = (root / model).resolve()  # links may not lead out of the directory either
        is_there = found.is_dir()
    except (OSError, RuntimeError) as error:  # too long, or a loop of links
        raise InvalidRequest(f"model {quote(model)}: {error}", "model") from error
    if not found.is_relative_to(root) or found == root:
        raise InvalidRequest(f"model {quote(model)} is not below gateway.weights_directory", "model")
    if not is_there:
        raise NotFound(f"model {quote(model)} is no directory", "model")
    return found
