"""`ChildOptions`: what the launcher tells a service that it starts, beside the config that all services share."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

import pydantic

from services.common.config import SocketAddress

Standby: TypeAlias = Literal["auto", "imports", "loaded"]


class ChildOptions(pydantic.BaseModel):
    """Private: it travels as JSON in the argument `--child`, and no user sets it. The defaults are for no launcher."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    launcher_pid: int | None = None  # the service ends when this process, its parent, does
    error_file: Path | None = None  # keeps the last error that the service has logged
    # of a worker: how far it gets ready to take over when the launcher says so. imports: modules, device and kernels;
    # loaded: the weights, too; auto: the most for which there is memory. None: it serves at once
    standby: Standby | None = None
    has_predecessor: bool = False  # of a worker: one that it replaces may still have the metrics' address
    opens_gpu: bool = False  # of a worker: it has a GPU, which it needs as soon as its modules are imported
    is_restarted: bool = False  # of a worker: streams wait for it
    rank: int = 0  # of a worker, if there are several ranks: which one it is
    attention_index: int = 0  # of an attention worker, if there are several: which one it is
    # of the first rank's dense worker: where the others' attention workers and dense shards are, in their order
    rank_attention_addresses: tuple[SocketAddress, ...] = ()
    shard_addresses: tuple[SocketAddress, ...] = ()
    shape_file: Path | None = None  # of a worker: the model's shape, see `services/common/ready_shape.py`
    lifeline: int | None = None  # the descriptor of its socket to the launcher, see `Lifeline`
    # of a dense worker: it states this hash instead of its own weights', and goes on with keys and values of others
    stated_weights_hash: str | None = None
    continues_sequences: bool = False  # of a dense worker: open requests of earlier weights go on with its own
    control_address: SocketAddress | None = None  # of a gateway: where the launcher answers
    http_listener: int | None = None  # of a gateway: the descriptor of the socket that systemd passes for its HTTP API
    shares_ports: bool = False  # of a gateway: with other gateways of this machine, by SO_REUSEPORT
    peer_address: SocketAddress | None = None  # where these gateways reach this one, and no client does
    peer_addresses: tuple[SocketAddress, ...] = ()  # where it reaches them
    shared_counts: Path | None = None  # the file of what they count together, for their limits
    process_index: int = 0  # of this one among them
    change_lock: Path | None = None  # the file that one of them locks while it changes what all of them serve
