"""`ChildOptions`: what the launcher tells a service that it starts, beside the config that all services share."""

from __future__ import annotations

from pathlib import Path

import pydantic

from services.common.config import SocketAddress


class ChildOptions(pydantic.BaseModel):
    """Private: it travels as JSON in the argument `--child`, and no user sets it. The defaults are for no launcher."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    launcher_pid: int | None = None  # the service ends when this process, its parent, does
    error_file: Path | None = None  # keeps the last error that the service has logged
    is_standby: bool = False  # of a dense worker: it loads, and attaches only when it is told to take over
    has_predecessor: bool = False  # of a dense worker: one that it replaces may still have the metrics' address
    # of a dense worker: it states this hash instead of its own weights', and goes on with keys and values of others
    stated_weights_hash: str | None = None
    shares_ports: bool = False  # of a gateway: with other gateways of this machine, by SO_REUSEPORT
    peer_address: SocketAddress | None = None  # where these gateways reach this one, and no client does
    peer_addresses: tuple[SocketAddress, ...] = ()  # where it reaches them
    change_lock: Path | None = None  # the file that one of them locks while it changes what all of them serve
