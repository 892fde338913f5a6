"""From the host to the device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on `device`, once all work enqueued before has run; the caller may reuse its memory at once."""
    source = torch.from_numpy(array)
    if device.type != "cuda":
        return source.to(device)
    # From pageable memory the copy would first wait for the stream; torch keeps pinned memory until the copy
    # is done.
    return source.pin_memory().to(device, non_blocking=True)
