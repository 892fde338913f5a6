"""`Alignment`: how the tokens of a prompt attend to the sound that their encoder has read. It tells when they are said.

The method is that of the code published with arXiv:2212.04356: the weights of some heads of cross attention, of which
each becomes the distance from the mean of all tokens, in standard deviations, then the median of some neighbours; then
the mean of the heads. The attention worker is not asked: queries cross the seam, and the encoder is here.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.nn import functional as F

from services.common.families.shape import LayerHeads
from services.pb import source_pb2

_TOKENS_AT_A_TIME = 64  # of which medians are taken, so that sorting takes limited memory


class Alignment:
    """Of one sequence. What it holds depends on places alone, so a sequence that begins again overwrites it."""

    def __init__(
        self, request: source_pb2.Alignment, num_tokens: int, layers: dict[int, LayerHeads], scale: float | None
    ) -> None:
        """num_tokens: of the prompt; layers: those with cross attention, by their numbers, in order; scale: of the
        scores; None: 1 / sqrt(head_dim)
        """
        self._first_token, self._num_tokens = request.first_token, num_tokens
        self._num_rows, self._filter_width = request.num_rows, request.filter_width
        self._layers, self._scale = layers, scale
        numbers = list(layers)
        self._heads = defaultdict[int, list[int]](list)  # by number of the layer
        for each in request.heads:
            self._heads[numbers[each.layer]].append(each.head)
        self._last_layer = max(self._heads)
        # By layer, of its heads: [num_source_rows, num_heads, head_dim] and [num_tokens - first_token, ...].
        self._keys: dict[int, torch.Tensor] = {}
        self._queries: dict[int, torch.Tensor] = {}

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose keys it takes."""
        return tuple(self._heads)

    def take_keys(self, layer: int, rows: torch.Tensor) -> None:
        """rows: the keys and values of the encoder's output, [num_source_rows, 2 * kv_size]."""
        heads = self._layers[layer]
        keys = rows.unflatten(1, (2, heads.num_kv_heads, heads.head_dim))[:, 0]
        group = heads.num_heads // heads.num_kv_heads
        self._keys[layer] = torch.stack([keys[:, head // group] for head in self._heads[layer]], dim=1)

    def take_queries(self, layer: int, rows: torch.Tensor, position: int) -> torch.Tensor | None:
        """rows: the q heads of tokens from `position` on, [num_tokens, q_size].

        Returns the answer, float32 [num_tokens - first_token, num_rows], when the last queries are there, and forgets
        all else.
        """
        if layer not in self._heads:
            return None
        heads, end = self._layers[layer], position + len(rows)
        first = max(position, self._first_token)
        if first < end:
            queries = rows[first - position :].unflatten(1, (heads.num_heads, heads.head_dim))
            if layer not in self._queries:
                shape = (self._num_tokens - self._first_token, len(self._heads[layer]), heads.head_dim)
                self._queries[layer] = rows.new_zeros(shape)
            place = self._queries[layer][first - self._first_token : end - self._first_token]
            torch.stack([queries[:, head] for head in self._heads[layer]], dim=1, out=place)
        if layer < self._last_layer or end < self._num_tokens:
            return None
        found = self._mean_of_heads()
        self._keys.clear()
        self._queries.clear()
        return found

    def _mean_of_heads(self) -> torch.Tensor:
        places = [(layer, place) for layer, heads in self._heads.items() for place in range(len(heads))]
        return sum(self._of_head(layer, place) for layer, place in places) / len(places)

    def _of_head(self, layer: int, place: int) -> torch.Tensor:
        scale = self._layers[layer].head_dim ** -0.5 if self._scale is None else self._scale
        scores = self._queries[layer][:, place].float() @ self._keys[layer][:, place].float().T * scale
        return medians(distances(scores.softmax(dim=1)[:, : self._num_rows]), self._filter_width)


def distances(weights: torch.Tensor) -> torch.Tensor:
    """[num_tokens, n] -> how many standard deviations each is above its column's mean; 0 where all are equal."""
    deviation, mean = torch.std_mean(weights, dim=0, correction=0)
    return ((weights - mean) / deviation).nan_to_num(0.0, 0.0, 0.0)


def medians(values: torch.Tensor, width: int) -> torch.Tensor:
    """[n, m] -> the median of each value and its neighbours in the row, `width` in all. Mirrored at both ends.

    Rows that are too short for that stay as they are.
    """
    beside = width // 2
    if not beside or values.shape[1] <= beside:
        return values
    found = torch.empty_like(values)
    for rows, place in zip(values.split(_TOKENS_AT_A_TIME), found.split(_TOKENS_AT_A_TIME), strict=True):
        windows = F.pad(rows[None], (beside, beside), mode="reflect")[0].unfold(1, width, 1)
        place.copy_(windows.sort(dim=2).values[:, :, beside])
    return found
