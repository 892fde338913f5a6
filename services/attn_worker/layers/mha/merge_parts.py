"""`merge_parts`: the attention of rows whose keys lie in several KV caches, from what each cache has of it.

Softmax over all keys is the mean of the softmaxes over the parts, each weighted by its sum of exponentials
(flash-decoding, https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge_parts(outputs: Sequence[torch.Tensor], log_sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """outputs: [num_rows, num_heads * head_dim] of each part; log_sums: float32 [num_rows, num_heads], log2 of its sum
    of exponentials, -inf where a row sees no key of it -> the same shape and dtype as an output.

    Each row sees a key of one part at least.
    """
    sums = torch.stack(list(log_sums))
    weights = torch.softmax(sums * torch.log(torch.tensor(2.0)), dim=0)[..., None]
    parts = torch.stack(list(outputs)).unflatten(-1, (sums.shape[-1], -1)).float()
    parts = torch.where(weights > 0, parts, 0.0)  # what a part without keys has written is no number
    return (weights * parts).sum(dim=0).flatten(-2).to(outputs[0].dtype)
