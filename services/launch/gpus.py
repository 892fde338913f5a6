"""What is known of GPUs without torch, which takes seconds to import: NVIDIA's program says it."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
from pathlib import Path
from typing import NamedTuple

from services.common.config import Config
from services.common.errors import ConfigError
from services.launch.mps import has_gpu

QUERY = ("nvidia-smi", "--query-gpu=uuid,name,memory.free", "--format=csv,noheader,nounits")
ANSWER_TIMEOUT_S = 10.0


class Gpu(NamedTuple):
    """A GPU of this machine."""

    uuid: str
    name: str
    free_bytes: int


def torch_cuda() -> str | None:
    """The CUDA version of torch, which is not imported for it; None for a build without CUDA, or without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]


def list_gpus() -> list[Gpu]:
    """All GPUs of this machine in the order of their slots; empty if there are none, or if the program is not there."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=True)
        rows = [line.split(", ") for line in done.stdout.splitlines()]
        return [Gpu(uuid, name, int(free) << 20) for uuid, name, free in rows]
    except (OSError, subprocess.SubprocessError, ValueError):  # the last: "[N/A]", which some boards say
        return []


def find_gpu(device: str, gpus: list[Gpu], visible: str | None) -> Gpu | None:
    """The GPU that torch will call `device`; None if that is not certain.

    `visible` is CUDA_VISIBLE_DEVICES. CUDA's order is that of the slots where all GPUs are alike.
    """
    index = int(device.partition(":")[2] or 0)
    if visible is not None:
        names = visible.split(",")
        if index >= len(names):
            return None
        if not names[index].isdecimal():
            return next((gpu for gpu in gpus if gpu.uuid.startswith(names[index]) and names[index]), None)
        index = int(names[index])
    are_alike = len({gpu.name for gpu in gpus}) == 1
    return gpus[index] if are_alike and index < len(gpus) else None


def visible_gpus(gpus: list[Gpu], visible: str | None) -> list[Gpu] | None:
    """The GPUs that processes see, if `visible` is CUDA_VISIBLE_DEVICES; None if a name in it is not known."""
    if visible is None:
        return gpus
    found = []
    for name in filter(None, visible.split(",")):
        if name.isdecimal():
            if int(name) >= len(gpus):
                break  # CUDA sees those before it
            found.append(gpus[int(name)])
            continue
        named = next((gpu for gpu in gpus if gpu.uuid.startswith(name)), None)
        if named is None:
            return None  # a part of a GPU, for example
        found.append(named)
    return found


def is_on_gpu(device: str) -> bool:
    """Whether a worker with this device, a key of the config, computes on a GPU."""
    return device != "cpu" and has_gpu() and os.environ.get("CUDA_VISIBLE_DEVICES") != "" and torch_cuda() is not None


def check_rank_gpus(config: Config) -> None:
    """Raises `ConfigError`, which says what to do, for too few GPUs, and for unequal ones. Nothing if none are known.

    All ranks do the same work in step: the slowest would set the pace, and the smallest the size of all KV caches.
    """
    count = config.dense.num_ranks
    if count == 1 or not is_on_gpu(config.dense.device):
        return
    gpus = visible_gpus(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        return
    kind = "pipeline" if config.dense.pipeline_parallel_size > 1 else "tensor"
    setting = f"dense.{kind}_parallel_size"
    if len(gpus) < count:
        raise ConfigError(
            f"{setting} is {count}, and {len(gpus)} GPUs are visible: set it to {len(gpus)} or less, or let"
            " CUDA_VISIBLE_DEVICES name more"
        )
    for rank, gpu in enumerate(gpus[:count]):
        if gpu.name != gpus[0].name:
            raise ConfigError(
                f"{setting} is {count}, and the GPUs are unequal: rank 0 would have {gpus[0].name}, rank {rank}"
                f" {gpu.name}: let CUDA_VISIBLE_DEVICES name {count} equal ones"
            )
