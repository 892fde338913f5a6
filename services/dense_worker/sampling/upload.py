"""Copies arrays from the host to the device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Enqueues a copy of the array to `device`. The caller may reuse the array's memory at once."""
    source = torch.from_numpy(array)
    if device.type != "cuda":
        return source.to(device)
    # A copy from pageable memory would first wait for the stream. torch keeps the pinned memory until the copy
    # is done.
    return source.pin_memory().to(device, non_blocking=True)
