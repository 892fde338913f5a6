"""`Picture`: what a tower reads. `scale_pixels` and `patches_of` make numbers of its bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.common.vision.layout import PictureShape
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.vision.resample import resample
from services.dense_worker.sampling.upload import upload


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Picture:
    """An `EncoderInput`. Sequences with equal pictures share one object."""

    hash: str  # of the tiles and all sizes, hexadecimal
    shape: PictureShape
    pixels: torch.Tensor  # uint8 [`PictureShape.pixels_shape`], in the host's memory


def scale_pixels(picture: Picture, scale: PixelScale, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[num_tiles, 3, height, width] in `dtype`, computed in float32."""
    shape, tiles = picture.shape, upload(picture.pixels.numpy(), device)
    if shape.resample is not None:
        tiles = resample(tiles[0], shape.height, shape.width, shape.resample)[None]
    return scale_bytes(tiles, scale).permute(0, 3, 1, 2).to(dtype)


def scale_bytes(colours: torch.Tensor, scale: PixelScale) -> torch.Tensor:
    """uint8 [..., 3] -> float32 [..., 3]"""
    mean, std = (upload(np.array(each, np.float32), colours.device) for each in (scale.mean, scale.std))
    return (colours.float() * scale.factor - mean) / std


def patches_of(image: torch.Tensor, size: int) -> torch.Tensor:
    """[..., 3, height, width] -> [..., rows, columns, 3, size, size]: squares of pixels."""
    return image.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).movedim((-4, -2), (-5, -4))
