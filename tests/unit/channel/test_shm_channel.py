"""The channel between two real processes: data, handoffs, aborts, epochs, and cleanup after dead processes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from services.channel import ChannelAborted, ChannelSpec, ChannelTimeout, Flag, region, shm
from services.channel.region import SHM_DIR, remove_stale_regions
from services.channel.shm import ShmChannel
from services.common.errors import CapacityError, PeerError, StaleEpoch

SPEC = ChannelSpec(max_tokens=8, qkv_size=12, attn_size=4, dtype=torch.bfloat16)
EPOCH = 0x1234_5678_9ABC_DEF0 ^ os.getpid()

PEER = """
import sys, torch
from services.channel import ChannelSpec, Flag
from services.channel.shm import ShmChannel
spec = ChannelSpec(8, 12, 4, torch.bfloat16)
channel = ShmChannel.map(sys.argv[1].encode(), spec, int(sys.argv[2]), 1, 20.0)
print("ready", flush=True)
for step in range(int(sys.argv[3])):
    channel.wait(Flag.QKV_READY)
    channel.attn_out[:] = channel.qkv[:, :4] + channel.qkv[:, 4:8]
    channel.signal(Flag.ATTENTION_READY)
channel.close()
"""


@pytest.fixture
def owner() -> Iterator[ShmChannel]:
    channel = ShmChannel.create(SPEC, EPOCH, 1, 0, wait_timeout_s=20.0)
    yield channel
    channel.close()
    assert not (SHM_DIR / channel.handle.decode()).exists()


def map_peer(owner: ShmChannel, wait_timeout_s: float = 20.0) -> ShmChannel:
    return ShmChannel.map(owner.handle, SPEC, EPOCH, 1, wait_timeout_s)


def test_others_see_which_flags_have_not_been_read(owner: ShmChannel) -> None:
    assert len(Flag) == region.NUM_FLAGS
    name, peer = owner.handle.decode(), map_peer(owner)

    def unread() -> list[int]:
        return region.unread_flags_of(os.getpid())[name]

    assert unread() == []
    owner.signal(Flag.LONG_STEP_QKV_READY)
    assert unread() == [Flag.LONG_STEP_QKV_READY]
    peer.wait(Flag.LONG_STEP_QKV_READY)
    peer.signal(Flag.ATTENTION_READY)
    assert unread() == [Flag.ATTENTION_READY]
    assert name not in region.unread_flags_of(os.getppid()), "it has no part in the region"
    peer.close()


def test_another_process_sees_what_was_written_before_each_signal(owner: ShmChannel) -> None:
    num_steps = 300
    command = [sys.executable, "-c", PEER, owner.handle.decode(), str(EPOCH), str(num_steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None and peer.stdout.readline() == "ready\n"
        generator = torch.Generator().manual_seed(0)
        for _ in range(num_steps):
            owner.qkv.copy_(torch.randint(-100, 100, (8, 12), generator=generator))
            expected = owner.qkv[:, :4] + owner.qkv[:, 4:8]
            owner.signal(Flag.QKV_READY)
            owner.wait(Flag.ATTENTION_READY)
            assert torch.equal(owner.attn_out, expected)
        assert peer.wait(20) == 0


def test_the_two_tensors_do_not_overlap(owner: ShmChannel) -> None:
    owner.qkv.fill_(1.0)
    owner.attn_out.fill_(2.0)
    assert owner.qkv.shape == (8, 12) and (owner.qkv == 1.0).all()
    assert owner.attn_out.shape == (8, 4) and (owner.attn_out == 2.0).all()


def test_errors_are_counted_on_both_sides(owner: ShmChannel) -> None:
    peer = map_peer(owner)
    owner.add_errors(2)
    owner.add_errors(1)
    assert peer.num_errors == owner.num_errors == 3
    peer.close()


@pytest.mark.parametrize("who_aborts", ["owner", "peer"])
def test_an_abort_releases_a_wait_on_the_other_side(owner: ShmChannel, who_aborts: str) -> None:
    peer = map_peer(owner)
    waiting, aborting = (peer, owner) if who_aborts == "owner" else (owner, peer)
    timer = threading.Timer(0.05, aborting.abort)
    timer.start()
    with pytest.raises(ChannelAborted, match="went away"):
        waiting.wait(Flag.ATTENTION_READY)
    peer.close()


def test_a_signal_before_an_abort_is_ignored_after_it(owner: ShmChannel) -> None:
    peer = map_peer(owner)
    owner.signal(Flag.ATTENTION_READY)
    owner.abort()
    with pytest.raises(ChannelAborted):
        peer.wait(Flag.ATTENTION_READY)
    peer.close()


def test_a_wait_without_a_peer_ends_and_names_flag_and_time_limit(owner: ShmChannel) -> None:
    peer = map_peer(owner, wait_timeout_s=0.05)
    with pytest.raises(ChannelTimeout, match=r"QKV_READY.*0\.05 s"):
        peer.wait(Flag.QKV_READY)
    peer.close()


def test_a_closed_region_is_unmapped_at_once_and_may_still_be_aborted(owner: ShmChannel) -> None:
    def num_mapped() -> int:
        return Path("/proc/self/maps").read_text().count(owner.handle.decode())

    peer = map_peer(owner)
    peer.abort()
    with pytest.raises(ChannelAborted) as caught:
        peer.wait(Flag.QKV_READY)
    assert num_mapped() == 2
    peer.close()
    assert num_mapped() == 1, f"{caught.value!r} must not keep it"
    peer.abort()  # by another thread, which does not know that it is closed


def test_a_stale_epoch_or_attachment_is_refused(owner: ShmChannel) -> None:
    for epoch, attachment_id in ((EPOCH + 1, 1), (EPOCH, 2)):
        with pytest.raises(StaleEpoch, match=f"expected epoch {epoch:016x}, attachment {attachment_id}"):
            ShmChannel.map(owner.handle, SPEC, epoch, attachment_id, 1.0)
    with pytest.raises(StaleEpoch, match="does not exist"):
        ShmChannel.map(b"twostroke-nothing", SPEC, EPOCH, 1, 1.0)


def test_a_region_of_another_shape_is_refused_with_both_sizes(owner: ShmChannel) -> None:
    larger = ChannelSpec(max_tokens=80_000, qkv_size=12, attn_size=4, dtype=torch.bfloat16)
    with pytest.raises(PeerError, match="bytes"):
        ShmChannel.map(owner.handle, larger, EPOCH, 1, 1.0)


def test_too_little_shared_memory_is_an_error_with_its_size() -> None:
    space = os.statvfs(SHM_DIR)
    rows = space.f_blocks * space.f_frsize // 24 + 1  # more than there is, whatever others free meanwhile
    with pytest.raises(CapacityError, match=r"needs \d+ bytes of shared memory.*free"):
        ShmChannel.create(ChannelSpec(rows, 12, 4, torch.bfloat16), EPOCH, 7, 0, 1.0)
    assert not list(SHM_DIR.glob(f"*{EPOCH:016x}-7*")), "the failed region was left behind"


@pytest.fixture
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of shared memory in the test: a cleanup finds no regions of other tests there."""
    monkeypatch.setattr(region, "SHM_DIR", tmp_path)
    return tmp_path


def test_only_regions_of_dead_processes_are_removed_and_first_aborted(own_directory: Path) -> None:
    """Their launcher may not have seen the death yet, and would not find them any more."""
    code = (
        "import sys, time, torch\n"
        "from pathlib import Path\n"
        "from services.channel import ChannelSpec, region\n"
        "from services.channel.shm import ShmChannel\n"
        "region.SHM_DIR = Path(sys.argv[1])\n"
        f"c = ShmChannel.create(ChannelSpec(8, 12, 4, torch.bfloat16), {EPOCH}, 2, 0, 1.0)\n"
        "print(c.handle.decode(), flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = ShmChannel.create(SPEC, EPOCH, 1, 0, wait_timeout_s=20.0)
    command = [sys.executable, "-c", code, str(own_directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    peer = ShmChannel.map(name.encode(), SPEC, EPOCH, 2, wait_timeout_s=20.0)
    assert remove_stale_regions() == [], "both creators live"
    process.kill()
    process.wait()
    process.stdout.close()
    peer.check()
    assert remove_stale_regions() == [name]
    with pytest.raises(ChannelAborted):
        peer.check()
    owner.check()
    peer.close()
    assert [path.name for path in own_directory.iterdir()] == [owner.handle.decode()]
    owner.close()


def test_a_waiting_thread_lets_other_threads_run(owner: ShmChannel) -> None:
    peer = map_peer(owner)
    thread = threading.Thread(target=peer.wait, args=(Flag.QKV_READY,))
    thread.start()
    counted, start, end = 0, time.monotonic(), time.monotonic() + 10.0
    while time.monotonic() < (start + 0.2 if counted > 1000 else end):  # a busy machine may take longer
        counted += 1
    owner.signal(Flag.QKV_READY)
    thread.join(30)
    assert not thread.is_alive() and counted > 1000
    peer.close()


def test_the_cleanup_tolerates_a_region_that_its_owner_just_removes(
    own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = ShmChannel.create(SPEC, EPOCH, 3, 0, wait_timeout_s=20.0)
    real_flock = fcntl.flock

    def flock(file: int, operation: int) -> None:
        channel.close()
        real_flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    remove_stale_regions()
    assert not list(own_directory.iterdir())


@pytest.mark.parametrize(("yield_s", "least", "most"), [(10e-6, 50, 150), (600e-6, 1, 1)], ids=["free", "contended"])
def test_a_wait_stops_yielding_a_core_that_another_process_needs(
    owner: ShmChannel, monkeypatch: pytest.MonkeyPatch, yield_s: float, least: int, most: int
) -> None:
    now, yields = 0.0, 0

    def perf_counter() -> float:
        nonlocal now
        now += 1e-6
        return now

    def sched_yield() -> None:
        nonlocal now, yields
        now, yields = now + yield_s, yields + 1

    def sleep(duration_s: float) -> None:
        nonlocal now
        now += duration_s
        if now > 5e-3:
            owner.signal(Flag.QKV_READY)

    monkeypatch.setattr(shm, "os", SimpleNamespace(sched_yield=sched_yield))
    monkeypatch.setattr(shm, "time", SimpleNamespace(perf_counter=perf_counter, sleep=sleep))
    owner.wait(Flag.QKV_READY)
    assert least <= yields <= most
    assert now > 5e-3
