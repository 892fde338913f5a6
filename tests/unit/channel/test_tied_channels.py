"""Channels of several ranks share their fate: what an abort lets through one rank's wait is used by none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from services.channel import ChannelAborted, ChannelSpec
from services.channel.region import _OWNER, ABORT_WORD, SHM_DIR, WORD_BYTES, _process_word, abort_regions_of
from services.channel.shm import ShmChannel
from services.common.errors import StaleEpoch
from services.dense_worker.runner.cuda_model_runner import _Launched

SPEC = ChannelSpec(max_tokens=8, qkv_size=12, attn_size=4, dtype=torch.bfloat16)
EPOCH = 0x2234_5678_9ABC_DEF0 ^ os.getpid()


class Seam(NamedTuple):
    """Both ends of one rank's channel."""

    attention: ShmChannel
    dense: ShmChannel

    @property
    def ends_waits(self) -> bool:
        """As a kernel that waits reads it."""
        content = (SHM_DIR / self.attention.handle.decode()).read_bytes()
        return any(content[ABORT_WORD * WORD_BYTES :][:WORD_BYTES])


@pytest.fixture
def seams() -> Iterator[list[Seam]]:
    """Of three ranks."""
    with ExitStack() as opened:
        found = []
        for rank in range(3):
            attention = ShmChannel.create(SPEC, EPOCH + rank, 1, 0, wait_timeout_s=5.0)
            opened.callback(attention.close)
            dense = ShmChannel.map(attention.handle, SPEC, EPOCH + rank, 1, 5.0)
            opened.callback(dense.close)
            found.append(Seam(attention, dense))
        yield found


def tie(seams: list[Seam]) -> None:
    seams[0].dense.tie(each.attention.handle for each in seams[1:])


def is_aborted(channel: ShmChannel) -> bool:
    try:
        channel.check()
    except ChannelAborted:
        return True
    return False


@pytest.mark.parametrize(
    "abort",
    [lambda seam: seam.attention.abort(), lambda seam: seam.dense.abort()],
    ids=["its attention worker", "its shard"],
)
def test_all_ends_find_the_abort_of_one_rank(seams: list[Seam], abort: Callable[[Seam], None]) -> None:
    tie(seams)
    assert not any(is_aborted(end) for seam in seams for end in seam)
    abort(seams[1])
    assert all(is_aborted(end) for seam in seams for end in seam)
    assert [seam.ends_waits for seam in seams] == [False, True, False], "others are released by their own ends"


def test_a_step_that_was_launched_before_the_abort_of_another_rank_is_not_collected(seams: list[Seam]) -> None:
    tie(seams)
    runner = SimpleNamespace(note_collected=lambda: None)
    _Launched(runner, seams[0].dense, None, ()).collect()
    step = _Launched(runner, seams[0].dense, None, ())
    seams[2].attention.abort()
    with pytest.raises(ChannelAborted):
        step.collect()


def test_the_death_of_a_process_dooms_all_ranks(seams: list[Seam]) -> None:
    """As the launcher marks it. Here all ends are of this process, so one is given to another that never was."""
    dead = 2**22 + 1  # more than process ids are
    seams[1].attention._region.words[_OWNER] = _process_word(dead)
    tie(seams)
    abort_regions_of(dead)
    assert all(is_aborted(end) for seam in seams for end in seam)
    assert [seam.ends_waits for seam in seams] == [False, True, False]


def test_channels_that_are_not_tied_are_aborted_alone(seams: list[Seam]) -> None:
    seams[1].attention.abort()
    assert not is_aborted(seams[0].dense) and not is_aborted(seams[0].attention)


def test_the_first_rank_sees_the_errors_of_all(seams: list[Seam]) -> None:
    tie(seams)
    seams[2].attention.add_errors(2)
    seams[1].attention.add_errors(1)
    assert [seam.dense.num_errors for seam in seams] == [2, 1, 2]


def test_a_region_that_is_gone_cannot_be_tied(seams: list[Seam]) -> None:
    with pytest.raises(StaleEpoch, match="twostroke-none does not exist"):
        seams[0].dense.tie([b"twostroke-none"])
