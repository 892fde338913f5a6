"""Checks of the scales that a checkpoint holds. A bad one would make wrong numbers, or NaN, without an error."""

from __future__ import annotations

import torch

from services.common.errors import ModelError
from services.dense_worker.parameters import Loaded


def checked_scales(loaded: Loaded, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The scales in `dtype`. Raises ModelError, naming tensor, place and value, unless all are finite and above 0."""
    scales = loaded.tensor.to(dtype)
    bad = ~(torch.isfinite(scales) & (scales > 0))
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        raise ModelError(
            f"{loaded.name} holds the scale {scales[index].item()} at {list(index)} "
            f"({loaded.tensor[index].item()} as stored), expected finite numbers above 0"
        )
    return scales
