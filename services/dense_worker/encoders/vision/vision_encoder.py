"""`VisionEncoder`: a tower as an `Encoder`. On a GPU it has a stream of its own, beside that of the steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.common.vision.layout import Layout
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.encoder import Encoded
from services.dense_worker.encoders.vision.load import Tower
from services.dense_worker.encoders.vision.picture import Picture


class VisionEncoder:
    """Used on the engine thread."""

    def __init__(self, tower: Tower, pixels: PixelScale, dtype: torch.dtype, device: torch.device) -> None:
        self._tower = tower
        self._pixels = pixels
        self._row_bytes = tower.config.width * dtype.itemsize
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._newest: torch.cuda.Event | None = None  # the end of what was enqueued last

    def warm_up(self, layout: Layout, max_rows: int) -> None:
        """Runs a GPU's largest usual batch, so that its memory is there and its kernels are loaded."""
        if self._stream is None:
            return
        shape = layout.shape_of(1024, 1024, is_low=False)
        tiles = torch.randint(256, (shape.num_tiles, shape.height, shape.width, 3), dtype=torch.uint8)
        example = Picture("", shape, tiles)
        self.encode([example] * max(1, max_rows // self.size(example)))
        self.wait()

    def size(self, each: Picture) -> int:
        """Its patches."""
        return self._tower.config.num_patches(each.shape)

    def output_bytes(self, each: Picture) -> int:
        """Of its rows of the prompt."""
        return self._tower.config.num_outputs(each.shape) * self._row_bytes

    @torch.inference_mode()
    def encode(self, inputs: Sequence[Picture]) -> list[Encoded]:
        """Runs the tower for all pictures together."""
        if self._stream is None:
            return [Encoded(rows.clone()) for rows in self._tower.forward(list(inputs), self._pixels)]
        with torch.cuda.stream(self._stream):
            # Each picture gets memory of its own, because they are forgotten one by one.
            found = [rows.clone() for rows in self._tower.forward(list(inputs), self._pixels)]
            self._newest = self._stream.record_event()
        return [Encoded(rows, self._newest) for rows in found]

    def is_busy(self) -> bool:
        """Whether the GPU still runs the tower."""
        return self._newest is not None and not self._newest.query()

    def wait(self) -> None:
        """Waits for the GPU."""
        if self._newest is not None:
            self._newest.synchronize()
