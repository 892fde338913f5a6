"""Resizing in bands by several threads: the bytes that Pillow makes of the whole picture."""

from __future__ import annotations

import random

import pytest

from services.common.vision.resize import begins_with_columns, resize_in_bands
from tests.support.dense.vision_models import noise

GENERATOR = random.Random(1)
SIZES = [(256, 256, 259, 259), (300, 200, 75, 50), (40, 60, 41, 200), (7, 90, 3, 3), (90, 7, 3, 3), (1, 1, 5, 4)]
SIZES += [tuple(GENERATOR.randint(4, 120) for _ in range(4)) for _ in range(60)]


@pytest.mark.parametrize("resample", [1, 2, 3])  # Lanczos, bilinear, bicubic
def test_bands_have_the_bytes_of_the_whole(resample: int) -> None:
    num_with_columns_first = 0
    for height, width, new_height, new_width in SIZES:
        picture = noise(height, width, height)
        found = resize_in_bands(picture, (new_width, new_height), resample, GENERATOR.randint(2, 5))
        assert found.tobytes() == picture.resize((new_width, new_height), resample).tobytes()
        num_with_columns_first += begins_with_columns((width, height), (new_width, new_height))
    assert 10 < num_with_columns_first < len(SIZES) - 10
