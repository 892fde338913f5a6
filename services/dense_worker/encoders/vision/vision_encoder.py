"""`VisionEncoder`: a tower as an `Encoder`. On a GPU it has a stream of its own, beside that of the steps."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

import torch

from services.common.vision.layout import Layout
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.encoder import Encoded
from services.dense_worker.encoders.vision.load import Tower
from services.dense_worker.encoders.vision.operations import TorchTowerOperations, TowerOperations
from services.dense_worker.encoders.vision.picture import Picture

MIN_PART_S = 0.02  # on a CPU: a part ends with the layer in which so much time is over


class VisionEncoder:
    """Used on the engine thread."""

    def __init__(self, tower: Tower, pixels: PixelScale, dtype: torch.dtype, device: torch.device) -> None:
        self._tower = tower
        self._pixels = pixels
        self._row_bytes = tower.config.width * dtype.itemsize
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._operations: TowerOperations
        if self._stream is None:
            self._operations = TorchTowerOperations()
        else:
            from services.dense_worker.encoders.vision.triton_operations import TritonTowerOperations

            self._operations = TritonTowerOperations(device)

    def warm_up(self, layout: Layout, max_rows: int) -> None:
        """Runs a GPU's largest usual batch, so that its memory is there and its kernels are loaded."""
        if self._stream is None:
            return
        shape = layout.shape_of(1024, 1024, is_low=False)
        tiles = torch.randint(256, (shape.num_tiles, shape.height, shape.width, 3), dtype=torch.uint8)
        example = Picture("", shape, tiles)
        self.begin([example] * max(1, max_rows // self.size(example))).advance()
        self._stream.synchronize()

    def size(self, each: Picture) -> int:
        """Its patches."""
        return self._tower.config.num_patches(each.shape)

    def output_bytes(self, each: Picture) -> int:
        """Of its rows of the prompt."""
        return self._tower.config.num_outputs(each.shape) * self._row_bytes

    def begin(self, inputs: Sequence[Picture]) -> VisionRun:
        """A run of the tower for all pictures together."""
        return VisionRun(self._tower.parts(inputs, self._pixels, self._operations), self._stream)


class VisionRun:
    """On a GPU it has one part, which is enqueued beside the steps. On a CPU, where steps wait, it has several."""

    def __init__(self, parts: Generator[None, None, list[torch.Tensor]], stream: torch.cuda.Stream | None) -> None:
        self._parts = parts
        self._stream = stream

    @torch.inference_mode()
    def advance(self) -> list[Encoded] | None:
        """Computes or enqueues the next layers."""
        if self._stream is None:
            rows = self._run(time.monotonic() + MIN_PART_S)
            return None if rows is None else [Encoded(each.clone()) for each in rows]
        with torch.cuda.stream(self._stream):
            rows = self._run(None)
            assert rows is not None, "it has run to its end"
            # Each picture gets memory of its own, because they are forgotten one by one.
            rows = [each.clone() for each in rows]
            done = self._stream.record_event()
        return [Encoded(each, done) for each in rows]

    def _run(self, end_s: float | None) -> list[torch.Tensor] | None:
        """Runs until the tower ends, or a layer does after `end_s`. Returns the rows of each picture, if it has ended.
        """
        try:
            next(self._parts)
            while end_s is None or time.monotonic() < end_s:
                next(self._parts)
        except StopIteration as ended:
            return ended.value
        return None
