"""`TowerGraphs`: the layers of Qwen's towers as CUDA graphs, one for each number of patches in steps of 512.

To launch the kernels of all layers takes the host longer than it takes a GPU to compute a picture of 10^6 pixels.
Pictures fill a graph from its start; what is behind them belongs to no sequence, and its results are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import numpy as np
import torch

from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.packed_attention import PackedSequences
from services.dense_worker.encoders.vision.operations import Rotation, TowerOperations
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.encoders.vision.qwen_vl import Grids, QwenVisionTower
from services.dense_worker.sampling.upload import upload

_STEP = 512
_PATCHES_PER_PICTURE = 512  # a graph has room for so many pictures; those that are not there cost a little


class Graph(Protocol):
    """A captured one."""

    def replay(self) -> None: ...


class Graphs(Protocol):
    """Of numbers of patches; see `StepGraphs`."""

    def find(self, size: int) -> Graph: ...


class TowerGraphs:
    """On one stream, which is the current one when `parts` runs."""

    def __init__(
        self,
        tower: QwenVisionTower,
        operations: TowerOperations,
        max_patches: int,
        graphs_of: Callable[[Callable[[int], None]], Graphs],
    ) -> None:
        """max_patches: of a run; runs with more are launched kernel by kernel. graphs_of: captures this function."""
        config, table = tower.config, tower.embedding.matrix.data
        self._tower, self._operations = tower, operations
        self._max_size = max_patches // _STEP * _STEP
        half, square = tower.head_dim // 2, config.merge_size**2
        self._x = table.new_zeros(self._max_size, config.hidden_size)
        self._rows = table.new_zeros(self._max_size // square, config.width)
        self._rotation = Rotation.of(torch.zeros(self._max_size, half, device=table.device))
        self._window_size = (config.window_size * config.merge_size) ** 2 or self._max_size  # patches, at most
        # At the edges of a picture windows are smaller.
        self._patches_per_window = max(1, min(self._window_size // 2, _PATCHES_PER_PICTURE))
        self._windows = _ends(self._max_size // self._patches_per_window, table.device)
        self._pictures = _ends(self._max_size // _PATCHES_PER_PICTURE, table.device)
        self._graphs = graphs_of(self._run)

    def capture_largest(self) -> None:
        """Now, because the KV cache will take the memory that is free.

        All others reuse its memory, but before each capture its size runs once outside of the graphs' memory.
        """
        if self._max_size:
            self._graphs.find(self._max_size)

    def parts(self, pictures: Sequence[Picture], pixels: PixelScale) -> Generator[None, None, list[torch.Tensor]]:
        """As the tower's `parts`."""
        tower, layout = self._tower, self._tower.lay_out(pictures)
        num_patches = len(layout.positions)
        num_windows, num_pictures = len(layout.windows), len(layout.pictures)
        most = max(num_patches, self._patches_per_window * num_windows, _PATCHES_PER_PICTURE * num_pictures)
        size = -(-most // _STEP) * _STEP
        if size > self._max_size:
            return (yield from tower.parts(pictures, pixels, self._operations))
        graph = self._graphs.find(size)  # first, since capturing computes with what is there
        order = upload(layout.order, self._x.device)
        self._x[:num_patches] = tower.embed(pictures, pixels, order, self._operations)
        rotation = tower.rotation(layout)
        self._rotation.cos[:num_patches], self._rotation.sin[:num_patches] = rotation.cos, rotation.sin
        for ends, lengths in ((self._windows, layout.windows), (self._pictures, layout.pictures)):
            values = np.full(len(ends), num_patches, np.int32)
            values[: len(lengths) + 1] = np.cumsum([0, *lengths])
            ends.copy_(upload(values, ends.device))
        graph.replay()
        return tower.by_picture(self._rows[: len(order)], order, pictures)

    def _run(self, size: int) -> None:
        """All layers for the first `size` patches."""
        windows = self._windows[: size // self._patches_per_window + 1]
        grids = Grids(
            PackedSequences.in_place(windows, size, self._window_size),
            PackedSequences.in_place(self._pictures[: size // _PATCHES_PER_PICTURE + 1], size, size),
            Rotation(self._rotation.cos[:size], self._rotation.sin[:size]),
        )
        layers = self._tower.compute(self._x[:size], grids, self._operations)
        while True:
            try:
                next(layers)
            except StopIteration as ended:
                self._rows[: len(ended.value)] = ended.value
                return


def _ends(num_sequences: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_sequences + 1, dtype=torch.int32, device=device)
