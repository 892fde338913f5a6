"""Pages as Nougat and Donut read them: the pixels of transformers' image processors with Pillow."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from transformers import DonutImageProcessorPil, NougatImageProcessorPil

from services.common.errors import InvalidRequest
from services.common.vision.page import BILINEAR, PageLayout
from tests.support.dense.vision_models import noise

HEIGHT, WIDTH = 64, 48
SIZES = [(300, 200), (200, 300), (64, 48), (48, 64), (50, 50), (20, 400), (400, 20), (7, 9), (63, 49), (130, 101)]


def page(height: int, width: int, seed: int) -> Image.Image:
    """Noise on a light page, with a margin that is not quite white."""
    found = Image.new("RGB", (width, height), (250, 251, 252))
    found.paste(noise(height - 4, width - 5, seed), (2, 3))
    return found


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("sides", [(HEIGHT, WIDTH), (WIDTH, HEIGHT), (HEIGHT, HEIGHT)])
@pytest.mark.parametrize("kind", ["nougat", "nougat-whole", "donut"])
def test_pixels_are_those_of_transformers(kind: str, sides: tuple[int, int], turns: bool) -> None:
    size = {"height": sides[0], "width": sides[1]}
    options = {"size": size, "do_align_long_axis": turns, "do_rescale": False, "do_normalize": False}
    crops = kind == "nougat"
    if kind == "donut":
        processor = DonutImageProcessorPil(**options)
    else:
        processor = NougatImageProcessorPil(**options, do_crop_margin=crops)
    layout = PageLayout(*sides, BILINEAR, 1, crops_margin=crops, turns=turns, is_nougat=kind != "donut")
    for seed, (height, width) in enumerate(SIZES):
        picture = page(height, width, seed)
        expected = np.asarray(processor(images=picture, return_tensors="np")["pixel_values"][0]).transpose(1, 2, 0)
        [found] = layout.tiles_of(picture, layout.shape_of(height, width, is_low=False))
        assert np.array_equal(np.asarray(found), expected), (height, width)


def test_an_empty_page_is_not_cropped() -> None:
    layout = PageLayout(HEIGHT, WIDTH, BILINEAR, 1, crops_margin=True, turns=False, is_nougat=True)
    [found] = layout.tiles_of(Image.new("RGB", (60, 80), (9, 9, 9)), layout.shape_of(80, 60, is_low=False))
    assert found.size == (WIDTH, HEIGHT) and found.getpixel((WIDTH // 2, HEIGHT // 2)) == (9, 9, 9)


def test_a_strip_is_refused_before_it_becomes_large() -> None:
    layout = PageLayout(HEIGHT, WIDTH, BILINEAR, 1, crops_margin=False, turns=False, is_nougat=False)
    [found] = layout.tiles_of(Image.new("RGB", (1, 200), "red"), layout.shape_of(200, 1, is_low=False))
    assert np.asarray(found).any(axis=2).sum() == HEIGHT, "a line of pixels"
    with pytest.raises(InvalidRequest, match="1 x 201 pixels: the longer side may be 200 times"):
        layout.tiles_of(Image.new("RGB", (1, 201)), layout.shape_of(201, 1, is_low=False))
