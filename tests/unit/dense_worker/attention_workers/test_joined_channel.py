"""The seams to two attention workers, each a thread here, as one channel: rows go where they belong and come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from services.channel import ChannelAborted, ChannelSpec, Flag, qkv_flag, rows_of_layer
from services.channel.region import SHM_DIR
from services.channel.shm import ShmChannel
from services.dense_worker.attention_workers.joined_channel import JoinedChannel, LayerSizes

SPEC = ChannelSpec(max_tokens=8, qkv_size=6, attn_size=4, dtype=torch.float32)
LAYERS = (LayerSizes(6, 4), LayerSizes(3, 2), LayerSizes(6, 4))  # the second one has narrower heads
ROWS = {0: np.array([0, 2, 5]), 7: np.array([1, 3, 4])}
EPOCH = 0x51 << 32 | os.getpid()
TIMEOUT_S = 20.0


@pytest.fixture
def owners() -> Iterator[dict[int, ShmChannel]]:
    with ExitStack() as stack:
        channels = {each: ShmChannel.create(SPEC, EPOCH, each, 0, TIMEOUT_S) for each in ROWS}
        for each in channels.values():
            stack.callback(each.close)
        yield channels


def join(owners: dict[int, ShmChannel], lost: list[int]) -> JoinedChannel:
    members = {each: ShmChannel.map(own.handle, SPEC, EPOCH, each, TIMEOUT_S) for each, own in owners.items()}
    return JoinedChannel(SPEC, LAYERS, members, lambda cache_id, reason: lost.append(cache_id))


def attend(channel: ShmChannel, num_rows: int, cache_id: int, num_layers: int) -> None:
    """What an attention worker does, here with a sum in place of attention, in which it can be told from others."""
    for sizes in LAYERS[:num_layers]:
        channel.wait(qkv_flag(num_rows))
        qkv, out = channel.qkv[:num_rows], channel.attn_out[:num_rows]
        rows_of_layer(out, sizes.attn_out)[:] = rows_of_layer(qkv, sizes.qkv).sum(1, keepdim=True) + cache_id
        channel.signal(Flag.ATTENTION_READY)


def run_step(joined: JoinedChannel, generator: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Runs all layers of a step of 6 rows; returns what went over the seam and came back, by layer."""
    crossed = []
    joined.expect(1, ROWS)
    joined.begin_step(1, 6)
    joined.begin_layers(6)
    for sizes in LAYERS:
        qkv = torch.rand(6, sizes.qkv, generator=generator)
        rows_of_layer(joined.qkv[:6], sizes.qkv)[:] = qkv
        joined.signal(Flag.QKV_READY)
        joined.wait(Flag.ATTENTION_READY)
        crossed.append((qkv, rows_of_layer(joined.fetch_attn_out(6), sizes.attn_out).clone()))
    return crossed


def test_each_worker_gets_its_rows_in_each_layer(owners: dict[int, ShmChannel]) -> None:
    joined = join(owners, [])
    threads = [threading.Thread(target=attend, args=(each, 3, cache_id, 3)) for cache_id, each in owners.items()]
    for thread in threads:
        thread.start()
    cache_of_row = torch.tensor([0, 7, 0, 7, 7, 0])[:, None]
    for qkv, attn_out in run_step(joined, torch.Generator().manual_seed(0)):
        assert torch.equal(attn_out, (qkv.sum(1, keepdim=True) + cache_of_row).expand_as(attn_out))
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert (joined.num_waits, joined.lost_caches) == (3, ())
    joined.close()


def test_a_worker_that_is_killed_in_a_step_is_noticed_before_anybody_has_been_told() -> None:
    """Nothing sets the abort mark of its region, as long as the kernel takes its memory apart."""
    code = "import time; from tests.unit.dense_worker.attention_workers.test_joined_channel import *\n"
    code += "own = ShmChannel.create(SPEC, EPOCH, 9, 0, TIMEOUT_S); print(EPOCH, own.handle.decode(), flush=True)\n"
    code += "own.wait(Flag.QKV_READY); print('in a step', flush=True); time.sleep(TIMEOUT_S)"
    lost: list[tuple[int, str]] = []
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        epoch, name = worker.stdout.readline().split()
        member = ShmChannel.map(name.encode(), SPEC, int(epoch), 9, 3 * TIMEOUT_S)
        joined = JoinedChannel(SPEC, LAYERS, {9: member}, lambda cache_id, reason: lost.append((cache_id, reason)))
        joined.expect(1, {9: np.array([0])})
        joined.begin_step(1, 1)
        joined.begin_layers(1)
        joined.signal(Flag.QKV_READY)
        assert worker.stdout.readline() == "in a step\n"
        os.kill(worker.pid, signal.SIGKILL)
        joined.wait(Flag.ATTENTION_READY)
        joined.close()
    (SHM_DIR / name).unlink()
    assert lost == [(9, "the peer is being killed")]


def test_a_worker_that_goes_in_a_step_leaves_the_rows_of_the_others(owners: dict[int, ShmChannel]) -> None:
    lost: list[int] = []
    joined = join(owners, lost)

    def die_in_the_second_layer() -> None:
        attend(owners[7], 3, 7, num_layers=1)
        owners[7].abort()

    threads = [
        threading.Thread(target=attend, args=(owners[0], 3, 0, 3)),
        threading.Thread(target=die_in_the_second_layer),
    ]
    for thread in threads:
        thread.start()
    for qkv, attn_out in run_step(joined, torch.Generator().manual_seed(0)):
        own = ROWS[0]
        assert torch.equal(attn_out[own], qkv[own].sum(1, keepdim=True).expand_as(attn_out[own]))
    assert torch.count_nonzero(attn_out[ROWS[7]]) == 0
    assert (lost, joined.lost_caches) == ([7], (7,))
    owners[7].add_errors(3)
    assert joined.num_errors == 0, "nobody answers for a worker that is gone"
    for thread in threads:
        thread.join(TIMEOUT_S)
    joined.close()


def test_an_abort_of_all_ends_a_wait(owners: dict[int, ShmChannel]) -> None:
    joined = join(owners, [])
    joined.expect(1, ROWS)
    joined.begin_step(1, 6)
    joined.begin_layers(6)
    joined.signal(Flag.QKV_READY)
    threading.Timer(0.05, joined.abort).start()
    with pytest.raises(ChannelAborted, match="all attention workers"):
        joined.wait(Flag.ATTENTION_READY)
    joined.close()
