"""Kernels that read pictures, against Pillow and against the formula of the scale, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from services.common.vision.layout import FILTERS, PictureShape
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.encoders.vision.triton_operations import TritonTowerOperations
from services.dense_worker.encoders.vision.triton_pixels import resample_lines
from services.dense_worker.kernels.triton_launch import KernelLauncher
from tests.support.dense.vision_models import noise

SCALE = PixelScale(1 / 255, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
# Height and width before and after. The third is one of those whose columns Pillow resizes first.
SIZES = [(56, 57, 59, 56), (1, 1, 5, 4), (120, 30, 60, 28), (60, 41, 60, 90), (90, 7, 3, 7), (30, 30, 30, 30)]


@pytest.mark.parametrize("number", FILTERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_bytes_are_those_of_pillow(
    sizes: tuple[int, int, int, int], number: int, kernel_device: torch.device
) -> None:
    height, width, new_height, new_width = sizes
    picture = noise(height, width, height)
    pixels = torch.from_numpy(np.array(picture)).to(kernel_device)
    found = resample_lines(KernelLauncher(kernel_device), pixels, new_height, new_width, number)
    assert np.array_equal(found.cpu().numpy(), np.asarray(picture.resize((new_width, new_height), number)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_towers_read_the_numbers_of_these_bytes(dtype: torch.dtype, kernel_device: torch.device) -> None:
    picture = noise(40, 50, 1)
    resized = np.stack([np.asarray(each) for each in (picture.resize((56, 42), 3), noise(42, 56, 2))])
    shapes = [PictureShape(1, 42, 56, 40, 50, 1, 1, 1, 3), PictureShape(2, 42, 56, 40, 50, 1, 1, 1)]
    given = [torch.from_numpy(np.array(picture))[None], torch.from_numpy(resized)]
    operations = TritonTowerOperations(kernel_device, dtype)
    mean, std = (torch.tensor(each, dtype=torch.float32) for each in (SCALE.mean, SCALE.std))
    expected = ((torch.from_numpy(resized).float() * SCALE.factor - mean) / std).permute(0, 3, 1, 2).to(dtype)
    for shape, pixels, numbers in zip(shapes, given, (expected[:1], expected), strict=True):
        found = operations.read_pixels(Picture("", shape, pixels), SCALE, kernel_device, dtype)
        assert torch.equal(found.cpu(), numbers)
