"""What a gateway sends of pictures and tables, against what the worker then has: its own bytes, once, not too many."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.errors import RequestAborted
from services.common.memory_file import MemoryFile
from services.common.sampling_params import SamplingParams
from services.common.vision.layout import PictureShape
from services.dense_worker.features.images.received_pictures import ReceivedPictures
from services.gateway.images.picture import Picture, encode_pictures
from services.gateway.link import sent_parts
from services.gateway.link.sent_parts import SentParts
from services.lora.prompt_embeds import make_prompt_embeds
from services.step import SequenceSpec
from services.step.prompt_span import PromptSpan

STREAM = 3


def picture(seed: int) -> Picture:
    height, width = 4 + seed % 3, 8
    shape = PictureShape(1, height, width, height, width, num_tokens=2)
    return Picture.of(shape, random.Random(seed).randbytes(shape.num_bytes), bytes([seed]))


class Link:
    """A gateway's stream to a worker, without the wire."""

    def __init__(self, *, shares_memory: bool = False) -> None:
        self.sent, self.received = SentParts(shares_memory=shares_memory), ReceivedPictures()

    def send(self, pictures: list[Picture]) -> int:
        """How many bytes of pixels are sent before a sequence with these pictures, which the worker must then have."""
        num_bytes = 0
        for message in self.sent.before_pictures(pictures):
            self.received.receive(message.picture_part, STREAM)
            num_bytes += len(message.picture_part.values)
        self.check(pictures)
        return num_bytes

    def check(self, pictures: list[Picture]) -> None:
        spans = tuple(PromptSpan(2 * index, 2, each.hash) for index, each in enumerate(pictures))
        spec = SequenceSpec("request", [1] * 2 * len(pictures), SamplingParams(), max_tokens=1, spans=spans)
        found = self.received.find(spec, encode_pictures(pictures), STREAM)
        assert [bytes(each.pixels.flatten().tolist()) for each in found] == [each.pixels[:] for each in pictures]


def test_each_picture_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_parts, "MAX_PART_BYTES", 50)
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
    monkeypatch.setattr(sent_parts, "MAX_KEPT_BYTES", most)
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


def in_file(seed: int) -> Picture:
    plain = picture(seed)
    file = MemoryFile(plain.pixels)
    file.seal()
    return replace(plain, pixels=file)


def test_of_files_only_the_place_is_sent_and_few_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_parts, "MAX_KEPT_FILES", 4)
    link = Link(shares_memory=True)
    assert link.send([in_file(0), picture(1)]) == len(picture(1).pixels)
    before = len(os.listdir("/proc/self/fd"))
    for seed in range(2, 50):
        assert link.send([in_file(seed), in_file(seed)]) == 0
    assert len(link.received._streams[STREAM]) <= 4 + 1 and len(os.listdir("/proc/self/fd")) <= before + 4
    assert Link().send([in_file(0)]) == len(picture(0).pixels), "to another machine bytes are sent"


def test_a_file_is_there_when_the_worker_opens_it_after_the_end_of_its_request() -> None:
    link, first = Link(shares_memory=True), in_file(0)
    messages = list(link.sent.before_pictures([first]))
    del first
    for message in messages:
        link.received.receive(message.picture_part, STREAM)
    assert link.send([in_file(0)]) == 0


def test_what_cannot_be_opened_was_not_sent() -> None:
    link, first = Link(shares_memory=True), in_file(0)
    [message] = link.sent.before_pictures([first])
    message.picture_part.file.inode += 1
    link.received.receive(message.picture_part, STREAM)
    with pytest.raises(RequestAborted, match="its file cannot be read"):
        link.check([first])
    message.picture_part.file.inode -= 1  # the worker tries again: it may have had too many open files
    link.check([first])


def test_a_table_of_vectors_is_sent_once_until_another_one_has_taken_its_place() -> None:
    sent = SentParts(shares_memory=False)
    one, other = (make_prompt_embeds(bytes([i]) * 12, 3, 2, "float16", "prompt_embeds") for i in (1, 2))
    for table, expected in ((one, one.values), (one, b""), (other, other.values), (one, one.values)):
        request: Any = SimpleNamespace(prompt_embeds=table, pictures=())
        parts = [each.prompt_embeds_part for each in sent.before(request)]
        assert b"".join(each.values for each in parts) == expected
        assert all(each.hash == table.hash for each in parts)
