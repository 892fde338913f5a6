"""What a gateway sends of pictures, against what the dense worker then has: its own bytes, once, and not too many."""

from __future__ import annotations

import random

import pytest

from services.common.errors import RequestAborted
from services.common.sampling_params import SamplingParams
from services.common.vision.layout import PictureShape
from services.dense_worker.features.images.received_pictures import ReceivedPictures
from services.gateway.images import sent_pictures
from services.gateway.images.picture import Picture, encode_pictures
from services.gateway.images.sent_pictures import SentPictures
from services.step import SequenceSpec
from services.step.prompt_span import PromptSpan

STREAM = 3


def picture(seed: int) -> Picture:
    height, width = 4 + seed % 3, 8
    shape = PictureShape(1, height, width, height, width, num_tokens=2)
    return Picture.of(shape, random.Random(seed).randbytes(shape.num_bytes), bytes([seed]))


class Link:
    """A gateway's stream to a worker, without the wire."""

    def __init__(self) -> None:
        self.sent, self.received = SentPictures(), ReceivedPictures()

    def send(self, pictures: list[Picture]) -> int:
        """How many bytes of pixels are sent before a sequence with these pictures, which the worker must then have."""
        num_bytes = 0
        for message in self.sent.parts_for(pictures):
            self.received.receive(message.picture_part, STREAM)
            num_bytes += len(message.picture_part.values)
        self.check(pictures)
        return num_bytes

    def check(self, pictures: list[Picture]) -> None:
        spans = tuple(PromptSpan(2 * index, 2, each.hash) for index, each in enumerate(pictures))
        spec = SequenceSpec("request", [1] * 2 * len(pictures), SamplingParams(), max_tokens=1, spans=spans)
        found = self.received.find(spec, encode_pictures(pictures), STREAM)
        assert [bytes(each.pixels.flatten().tolist()) for each in found] == [each.pixels for each in pictures]


def test_each_picture_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_pictures, "MAX_PART_BYTES", 50)
    first, second, third = map(picture, range(3))
    link = Link()
    assert link.send([first, second, first]) == len(first.pixels) + len(second.pixels)
    assert link.send([second]) == 0
    assert link.send([third, first]) == len(third.pixels)
    link.received.end_stream(STREAM)
    with pytest.raises(RequestAborted, match="0 have been sent"):
        link.check([first])


def test_the_worker_keeps_the_latest_ones_and_all_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1000
    monkeypatch.setattr(sent_pictures, "MAX_KEPT_BYTES", most)
    pictures, generator, link = [picture(seed) for seed in range(20)], random.Random(1), Link()
    num_sent = 0
    for _ in range(200):
        asked = generator.choices(pictures, k=generator.randint(1, 10))
        num_sent += link.send(asked) > 0
        kept = sum(map(len, link.received._streams[STREAM].values()))
        assert kept <= max(most, sum(len(each.pixels) for each in set(asked)))
    assert 0 < num_sent < 200
    link.send(pictures[:2])
    link.send(pictures[2:4])
    assert link.send(pictures[:4]) == 0
