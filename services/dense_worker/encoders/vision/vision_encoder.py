"""`VisionEncoder`: a tower as an `Encoder`. On a GPU it has a stream of its own, beside that of the steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.common.cuda_graphs import StepGraphs
from services.common.vision.layout import Layout, resized_by_worker
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.packed_attention import suits_flash_kernel
from services.dense_worker.encoders.run_in_parts import RunInParts
from services.dense_worker.encoders.vision.load import Tower
from services.dense_worker.encoders.vision.operations import TorchTowerOperations, TowerOperations
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.encoders.vision.qwen_vl import QwenVisionTower
from services.dense_worker.encoders.vision.tensorrt.tower_plans import TowerPlans
from services.dense_worker.encoders.vision.tower_graphs import TowerGraphs


class VisionEncoder:
    """Used on the engine thread."""

    def __init__(
        self,
        tower: Tower,
        pixels: PixelScale,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        plans: TowerPlans | None = None,
    ) -> None:
        """max_rows: of a run of several pictures. plans: of TensorRT; None: torch runs all of it."""
        self._tower = tower
        self._max_rows = max_rows
        self._pixels = pixels
        self._row_bytes = tower.config.width * dtype.itemsize
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._operations: TowerOperations
        if self._stream is None:
            self._operations = TorchTowerOperations()
        else:
            from services.dense_worker.encoders.vision.triton_operations import TritonTowerOperations

            self._operations = TritonTowerOperations(device, dtype)
        self._graphs: TowerGraphs | None = None  # None: kernels are launched one by one
        if plans is not None:
            self._operations = plans.operations(tower, self._operations, device)
        elif isinstance(tower, QwenVisionTower) and suits_flash_kernel(device, dtype, tower.head_dim):
            self._graphs = TowerGraphs(
                tower,
                self._operations,
                max_rows,
                lambda run: StepGraphs(self._stream, run, run, what="the CUDA graphs of the tower"),
            )

    def warm_up(self, layout: Layout) -> None:
        """Runs a GPU's largest usual batch, so that its memory is there and its kernels are loaded."""
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))  # which has filled the graphs' tables
        if self._graphs is not None:
            self._graphs.capture_largest()
        shape = resized_by_worker(layout, layout.shape_of(1023, 1023, is_low=False))  # no multiple of a unit
        example = Picture("", shape, torch.randint(256, shape.pixels_shape, dtype=torch.uint8))
        self.begin([example] * max(1, self._max_rows // self.size(example))).advance()
        self._stream.synchronize()

    def size(self, each: Picture) -> int:
        """Its patches."""
        return self._tower.config.num_patches(each.shape)

    def output_bytes(self, each: Picture) -> int:
        """Of its rows of the prompt."""
        return self._tower.config.num_outputs(each.shape) * self._row_bytes

    def begin(self, inputs: Sequence[Picture]) -> RunInParts:
        """A run of the tower for all pictures together."""
        if self._graphs is not None:
            return RunInParts(self._graphs.parts(inputs, self._pixels), self._stream)
        return RunInParts(self._tower.parts(inputs, self._pixels, self._operations), self._stream)
