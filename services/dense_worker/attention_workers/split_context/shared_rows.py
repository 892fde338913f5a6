"""`SharedRows`: the attention of rows whose keys several attention workers have, from what each has made of its part.

Softmax over all keys is the mean of the softmaxes over the parts, each weighted by its sum of exponentials
(flash-decoding, https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SharedRows:
    """Of one step."""

    def __init__(self, rows: Sequence[torch.Tensor], num_rows: int) -> None:
        """rows: of each worker, int64; num_rows: of the step"""
        counts = torch.bincount(torch.cat(list(rows)), minlength=num_rows) if rows else torch.zeros(0)
        self.rows = torch.nonzero(counts > 1).flatten()  # int64 [num_shared]
        places = torch.full((num_rows,), -1, dtype=torch.int64)
        places[self.rows] = torch.arange(len(self.rows))
        # Of each worker, for those of its rows that others have, too: which ones these are, and their places in `rows`.
        self._own = [torch.nonzero(places[each] >= 0).flatten() for each in rows]
        self._places = [places[each[own]] for each, own in zip(rows, self._own, strict=True)]

    def merge(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> torch.Tensor:
        """The attention of the shared rows, [num_shared, attn_size]; zeros for rows that see no key.

        parts: of each worker the outputs of all its rows, [n, attn_size], and their log-sums, float32 [n, num_heads],
        -inf where a row sees no key, whose output then has no meaning; None if it is gone
        """
        present = [each for each in zip(parts, self._own, self._places, strict=True) if each[0] is not None]
        if not present:
            return torch.zeros(())
        outputs, log_sums = present[0][0]
        num_heads = log_sums.shape[1]
        all_sums = torch.full((len(present), len(self.rows), num_heads), float("-inf"))
        all_outputs = torch.zeros(len(present), len(self.rows), num_heads, outputs.shape[1] // num_heads)
        for index, ((output, sums), own, places) in enumerate(present):
            all_sums[index, places] = sums[own]
            all_outputs[index, places] = output[own].float().unflatten(1, (num_heads, -1))
        weights = torch.nan_to_num(torch.softmax(all_sums, dim=0), 0.0)[..., None]
        all_outputs.masked_fill_(weights == 0.0, 0.0)
        return (weights * all_outputs).sum(dim=0).flatten(1).to(outputs.dtype)
