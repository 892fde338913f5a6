"""`RunnableEncoder`: the encoder of a model whose decoder has cross attention, as an `Encoder` that runs between steps.

On a GPU it has a stream of its own, beside that of the steps.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from services.common.families.shape import EncoderConfig
from services.common.vision.layout import PictureShape
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.run_in_parts import RunInParts
from services.dense_worker.encoders.source.picture_tokens import SourceTokens
from services.dense_worker.encoders.source.source_encoder import SourceEncoder
from services.dense_worker.encoders.vision.picture import Picture, scale_pixels
from services.dense_worker.model.torch_operations import TorchOperations

MAX_PRODUCTS = 2**30  # on a CPU: of a part of a layer of very many rows; about 0.03 s on two cores
_NO_LIMIT = 2**60


@dataclass(frozen=True, slots=True, eq=False)
class SourceInput:
    """What it reads for one sequence. An `EncoderInput`."""

    hash: str  # of the input, hexadecimal
    # On the host: int64 [length] token ids, or these with pictures; float32 [num_mel_bins, length] features of sound; a
    # page.
    data: torch.Tensor | SourceTokens | Picture
    num_rows: int  # of the output


class RunnableEncoder:
    """Used on the engine thread."""

    def __init__(
        self, encoder: SourceEncoder, pixels: PixelScale | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """pixels: of pages; None: it reads none"""
        self._body = encoder.body
        self._pixels, self._dtype, self._device = pixels, dtype, device
        self._row_bytes = encoder.cross_kv[0].in_features * dtype.itemsize
        self._operations = TorchOperations()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._max_products = MAX_PRODUCTS if self._stream is None else _NO_LIMIT

    def warm_up(self, config: EncoderConfig, max_rows: int) -> None:
        """Runs a GPU's largest usual batch, so that its memory is there and its kernels are loaded. No pictures."""
        if self._stream is None:
            return
        example = example_input(config, max_rows)
        self.begin([example] * max(1, max_rows // self.size(example))).advance()
        self._stream.synchronize()

    def size(self, each: SourceInput) -> int:
        """The most rows that a layer computes of it."""
        return self._body.num_inner_rows(each.data)

    def output_bytes(self, each: SourceInput) -> int:
        """Of the rows that cross attention reads, before they become keys and values."""
        return each.num_rows * self._row_bytes

    def begin(self, inputs: Sequence[SourceInput]) -> RunInParts:
        """A run of the encoder for all inputs together."""
        return RunInParts(self._parts(inputs), self._stream)

    def _parts(self, inputs: Sequence[SourceInput]) -> Generator[None, None, list[torch.Tensor]]:
        data = [self._to_device(each.data) for each in inputs]
        output = yield from self._body.parts(self._operations, data, self._max_products)
        return list(output.split([each.num_rows for each in inputs]))

    def _to_device(self, data: torch.Tensor | SourceTokens | Picture) -> torch.Tensor | SourceTokens:
        """Tokens as they are, and sound and pages in the model's dtype; a tower uploads its pictures."""
        if isinstance(data, SourceTokens):
            return SourceTokens(self._to_device(data.ids), data.pictures)
        if isinstance(data, Picture):
            assert self._pixels is not None, "the model reads pages"
            return scale_pixels(data, self._pixels, self._device, self._dtype)[0]
        if self._stream is not None:
            data = data.pin_memory().to(self._device, non_blocking=True)
        return data.to(self._dtype) if data.is_floating_point() else data


def example_input(config: EncoderConfig, max_rows: int) -> SourceInput:
    """An input of the largest size, of up to so many tokens."""
    if config.swin is not None:
        height, width = config.swin.height, config.swin.width
        shape = PictureShape(1, height, width, height, width, config.swin.num_outputs)
        page = Picture("", shape, torch.zeros(1, height, width, 3, dtype=torch.uint8))
        return SourceInput("", page, config.swin.num_outputs)
    if config.num_mel_bins:
        num_rows = config.max_source_len
        return SourceInput("", torch.zeros(config.num_mel_bins, 2 * num_rows), num_rows)
    num_rows = min(config.max_source_len, max_rows)
    ids = torch.zeros(num_rows, dtype=torch.int64)
    return SourceInput("", ids if config.pictures is None else SourceTokens(ids, ()), num_rows)
