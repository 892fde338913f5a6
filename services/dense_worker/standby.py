"""How much a standby of the dense worker holds: its weights, or only what can be ready without them."""

from __future__ import annotations

import structlog
import torch

from services.common.child_options import Standby
from services.common.errors import CapacityError
from services.common.process import GPU_STANDBY_BYTES, STANDBY_BYTES, available_bytes
from services.common.resolve import ResolvedModel
from services.dense_worker.model.weights import empty_weights

log = structlog.get_logger()


def holds_weights(asked: Standby, model: ResolvedModel, num_bytes: int) -> bool:
    """Whether the standby has the weights ready. `auto` has if that fits into the memory that is free now.

    `num_bytes`: of the weights of which it needs a copy of its own, because the launcher has none in memory.

    Raises `CapacityError`, naming need and room, if what was asked for does not fit.
    """
    host = available_bytes()
    if model.device.type == "cpu":
        free, need = host - STANDBY_BYTES, num_bytes
    else:
        free, need = torch.cuda.mem_get_info(model.device)[0], num_bytes + GPU_STANDBY_BYTES
    if host < STANDBY_BYTES:
        raise CapacityError(
            f"a standby of the dense worker needs {STANDBY_BYTES} bytes of host memory, {host} are available"
        )
    if asked == "loaded" and need > free:
        raise CapacityError(
            f"a second dense worker needs {need} bytes, {num_bytes} of them for its copy of the weights, "
            f"{free} are free on {model.device!s}"
        )
    is_loaded = asked == "loaded" or (asked == "auto" and need <= free)
    log.info("standby", holds_weights=is_loaded, own_weight_bytes=num_bytes, needed_bytes=need, free_bytes=free)
    return is_loaded


def weight_bytes(model: ResolvedModel) -> int:
    """The size of the model's tensors in memory."""
    weights = empty_weights(model.config, model.dtype, torch.device("meta"), rank=model.rank)
    return sum(tensor.nbytes for _, tensor in weights.named_tensors())
