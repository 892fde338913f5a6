"""The one place that chooses a kind of channel."""

from __future__ import annotations

import torch

from services.channel import Channel, ChannelSpec
from services.channel.shm import ShmChannel
from services.common.errors import ConfigError


def create_channel(
    device: torch.device,
    peer_gpu: str,
    spec: ChannelSpec,
    epoch: int,
    attachment_id: int,
    lane: int,
    wait_timeout_s: float,
    num_lanes: int = 1,
) -> Channel:
    """Creates the attention worker's end of a channel between its `device` and the dense worker's GPU.

    `peer_gpu` is that GPU's UUID; `lane` is one of `num_lanes`. Raises `CapacityError` when memory is short.
    """
    if device.type == "cpu":
        return ShmChannel.create(spec, epoch, attachment_id, lane, wait_timeout_s)
    from services.channel.cuda_ipc import CudaIpcChannel, choose_kind  # needs cuda-bindings

    kind = choose_kind(device, peer_gpu, num_lanes)
    return CudaIpcChannel.create(device, kind, spec, epoch, attachment_id, lane)


def map_channel(
    device: torch.device,
    kind: str,
    handle: bytes,
    spec: ChannelSpec,
    epoch: int,
    attachment_id: int,
    wait_timeout_s: float,
) -> Channel:
    """Maps the dense worker's end of a channel that the attention worker has created.

    Raises `StaleEpoch`, or `ConfigError` when the two workers' devices cannot share memory.
    """
    own_kind = "shm" if device.type == "cpu" else "cuda_ipc"
    if not kind.startswith(own_kind):
        raise ConfigError(
            f"the attention worker offers a {kind} channel, the dense worker on {device} needs {own_kind}"
        )
    if kind == "shm":
        return ShmChannel.map(handle, spec, epoch, attachment_id, wait_timeout_s)
    from services.channel.cuda_ipc import CudaIpcChannel  # needs cuda-bindings

    return CudaIpcChannel.map(device, kind, handle, spec, epoch, attachment_id)
