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
from services.dense_worker.encoders.vision.qwen_vl import Grids, QwenVisionTower, TowerLayout, axial_angles
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
        self._x = table.new_zeros(self._max_size, config.hidden_size)
        self._rows = table.new_zeros(self._max_size // config.merge_size**2, config.width)
        self._angle_steps = upload(tower.angle_steps(), table.device)
        self._window_size = (config.window_size * config.merge_size) ** 2 or self._max_size  # patches, at most
        # At the edges of a picture windows are smaller.
        self._patches_per_window = max(1, min(self._window_size // 2, _PATCHES_PER_PICTURE))
        # What `_fields` names, one after another, so that one copy moves it.
        self._layout = torch.zeros(sum(self._fields(self._max_size)), dtype=torch.int32, device=table.device)
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
        packed = upload(self._pack(layout, size), self._x.device)
        self._layout[: len(packed)] = packed
        graph = self._graphs.find(size)  # capturing computes, with this layout and whatever there is else
        self._x[:num_patches] = tower.embed(pictures, pixels, self._operations)
        graph.replay()
        return tower.by_picture(self._rows[: len(layout.order)], pictures)

    def _fields(self, size: int) -> tuple[int, int, int, int]:
        """The lengths of the order, the positions, the ends of windows and those of pictures, for so many patches."""
        num_windows, num_pictures = size // self._patches_per_window, size // _PATCHES_PER_PICTURE
        return size // self._tower.config.merge_size**2, 2 * size, num_windows + 1, num_pictures + 1

    def _pack(self, layout: TowerLayout, size: int) -> np.ndarray:
        """The layout of a run. What is behind its pictures stays where it is, and belongs to no window."""
        num_squares, num_patches = len(layout.order), len(layout.positions)
        packed = np.full(sum(lengths := self._fields(size)), num_patches, np.int32)
        order, positions, *ends = np.split(packed, np.cumsum(lengths)[:-1])
        order[:num_squares], order[num_squares:] = layout.order, np.arange(num_squares, len(order))
        positions[: 2 * num_patches] = layout.positions.ravel()
        for each, found in zip(ends, (layout.windows, layout.pictures), strict=True):
            each[: len(found) + 1] = np.cumsum([0, *found])
        return packed

    def _run(self, size: int) -> None:
        """All layers for the first `size` patches."""
        order, positions, windows, pictures = self._layout[: sum(self._fields(size))].split(self._fields(size))
        grids = Grids(
            order,
            PackedSequences.in_place(windows, size, self._window_size),
            PackedSequences.in_place(pictures, size, size),
            Rotation.of(axial_angles(positions.view(-1, 2), self._angle_steps)),
        )
        layers = self._tower.compute(self._x[:size], grids, self._operations)
        while True:
            try:
                next(layers)
            except StopIteration as ended:
                self._rows[: len(ended.value)] = ended.value
                return
