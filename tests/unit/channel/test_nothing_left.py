"""`assert_nothing_left` finds shared memory that a cluster left behind, and waits for that of other clusters."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from services.channel.region import LINK_SUFFIX, NAME_PREFIX
from tests.support import cluster
from tests.support.cluster import assert_nothing_left, stale_regions

EPOCH = "00000000deadbeef"


@pytest.fixture
def region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A region such as a killed attention worker leaves: nobody holds its lock. No other cluster can remove it."""
    monkeypatch.setattr(cluster, "SHM_DIR", tmp_path)
    path = tmp_path / f"{NAME_PREFIX}{EPOCH}-1-0"
    path.write_bytes(b"left")
    return path


def test_a_region_to_which_a_logged_dense_worker_attached_counts_as_left(region: Path) -> None:
    assert stale_regions() == {region}
    with pytest.raises(AssertionError, match=EPOCH):
        assert_nothing_left(set(), f"level=info event=attached epoch={EPOCH} num_blocks=7\n")
    assert_nothing_left({region}, f"level=info event=attached epoch={EPOCH} num_blocks=7\n")


def test_a_socket_counts_as_left_if_there_is_no_region_beside_it(region: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(region.parent)  # a socket's name may have no more than 107 bytes
    alone = f"{NAME_PREFIX}{EPOCH}-2{LINK_SUFFIX}"
    with socket.socket(socket.AF_UNIX) as beside, socket.socket(socket.AF_UNIX) as left:
        beside.bind(f"{NAME_PREFIX}{EPOCH}-1{LINK_SUFFIX}")
        left.bind(alone)
        assert stale_regions() == {region, region.with_name(alone)}


def test_a_region_of_another_cluster_may_disappear_later(region: Path) -> None:
    threading.Timer(0.2, region.unlink).start()
    assert_nothing_left(set(), "level=info event=attached epoch=0000000012345678 num_blocks=7\n")
    assert not region.exists()


def test_a_region_that_nobody_removes_counts_as_left(region: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "STOP_TIMEOUT_S", 0.2)
    with pytest.raises(AssertionError, match=EPOCH):
        assert_nothing_left(set(), "")
