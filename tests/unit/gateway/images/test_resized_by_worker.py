"""Pictures that the dense worker resizes: the bytes are Pillow's, and the tower reads the same numbers."""

from __future__ import annotations

import asyncio
import io
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from services.common.sampling_params import SamplingParams
from services.common.vision.layout import FILTERS, MAX_GROWTH, Layout, resized_by_worker
from services.common.vision.llava import StretchedLayout
from services.common.vision.pixtral import PixtralLayout
from services.common.vision.qwen_vl import QwenLayout
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.vision.picture import scale_pixels
from services.dense_worker.encoders.vision.resample import resample
from services.dense_worker.features.images.received_pictures import ReceivedPictures
from services.gateway.images.decoder import Decoder, Encoding
from services.gateway.images.picture import Picture, encode_pictures
from services.gateway.images.sources import PictureFile
from services.gateway.link.sent_parts import SentParts
from services.gateway.resources.memory_budget import HeldMemory, MemoryBudget
from services.step import SequenceSpec
from services.step.prompt_span import PromptSpan
from tests.support.dense.vision_models import noise

GENERATOR = random.Random(2)
# The third is one of those whose columns Pillow resizes first.
SIZES = [(256, 256, 259, 259), (1, 1, 5, 4), (120, 30, 60, 28), (60, 41, 60, 90), (300, 7, 3, 7)]
SIZES += [tuple(GENERATOR.randint(1, 130) for _ in range(4)) for _ in range(80)]
SCALE = PixelScale(1 / 255, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
QWEN = QwenLayout(unit=28, min_pixels=56 * 56, max_pixels=2**20, resample=3)
CLIENT = (0, 1)


@pytest.mark.parametrize("number", FILTERS)
def test_the_worker_makes_the_bytes_of_pillow(number: int) -> None:
    for height, width, new_height, new_width in SIZES:
        picture = noise(height, width, height)
        found = resample(torch.from_numpy(np.array(picture)), new_height, new_width, number)
        assert np.array_equal(found.numpy(), np.asarray(picture.resize((new_width, new_height), number)))


def test_only_what_is_not_far_larger_is_left_to_the_worker() -> None:
    def is_left(layout: Layout, height: int, width: int) -> bool:
        shape = resized_by_worker(layout, layout.shape_of(height, width, is_low=False))
        assert shape.num_bytes <= MAX_GROWTH * replace(shape, resample=None).num_bytes
        return shape.resample is not None

    assert is_left(QWEN, 100, 100) and is_left(QWEN, 1400, 1400)
    assert not is_left(QWEN, 1500, 1500), "it has more than twice as many pixels as allowed"
    assert not is_left(QWEN, 56, 84), "it has its size already"
    assert is_left(PixtralLayout(16, 1024, 3), 1000, 1000) and not is_left(PixtralLayout(16, 1024, 3), 2000, 2000)
    assert not is_left(StretchedLayout(336, 3, 576), 330, 330)
    assert not is_left(replace(QWEN, resample=0), 100, 100), "the worker has no such filter"


@pytest.mark.parametrize(("kind", "layout"), [("JPEG", QWEN), ("PNG", PixtralLayout(16, 256, 2))])
def test_a_tower_reads_the_same_numbers(kind: str, layout: Layout) -> None:
    files = []
    for height, width in ((200, 260), (300, 90)):
        buffer = io.BytesIO()
        noise(height, width, height).save(buffer, kind)
        files.append(buffer.getvalue())

    async def decode(*, worker_resizes: bool) -> list[Picture]:
        decoder, held = Decoder(layout, 10**6), HeldMemory(MemoryBudget(2**30), CLIENT)
        try:
            encoded = [Encoding(PictureFile.of(data), False, worker_resizes) for data in files]
            return [await decoder.decode(each, CLIENT, held, asyncio.Lock()) for each in encoded]
        finally:
            await decoder.close()

    left, resized = (asyncio.run(decode(worker_resizes=each)) for each in (True, False))
    assert all(each.shape.resample is not None for each in left)
    assert all(each.shape.resample is None for each in resized)
    for data, one in zip(files, left, strict=True):
        assert one.pixels[:] == Image.open(io.BytesIO(data)).tobytes()
    assert [replace(each.shape, resample=None) for each in left] == [each.shape for each in resized]
    # The worker may have one of them twice, after another kind of worker has taken its place.
    assert {each.hash for each in left}.isdisjoint(each.hash for each in resized)
    for shares_memory in (False, True):
        numbers = [received(each, shares_memory=shares_memory) for each in (left, resized)]
        assert all(torch.equal(one, other) for one, other in zip(*numbers, strict=True))


def received(pictures: list[Picture], *, shares_memory: bool) -> list[torch.Tensor]:
    """What the worker makes of what it is sent."""
    worker, spans, start = ReceivedPictures(), [], 0
    for message in SentParts(shares_memory=shares_memory).before_pictures(pictures):
        worker.receive(message.picture_part, 1)
    for each in pictures:
        shape = each.shape
        spans.append(PromptSpan(start, shape.num_tokens, each.hash, shape.grid_rows, shape.grid_columns))
        start += shape.num_tokens
    spec = SequenceSpec("request", [1] * start, SamplingParams(), max_tokens=1, spans=tuple(spans))
    found = worker.find(spec, encode_pictures(pictures), 1)
    return [scale_pixels(each, SCALE, torch.device("cpu"), torch.float32) for each in found]
