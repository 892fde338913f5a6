"""What tests of clusters say of the shared memory that is there after them: theirs, or of others that still run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.channel.shm_cleanup import NAME_PREFIX, SHM_DIR
from tests.support.cluster import assert_nothing_left, stale_regions

EPOCH = "00000000deadbeef"


@pytest.fixture
def region() -> Iterator[Path]:
    """As a killed attention worker leaves one: nobody holds its lock."""
    path = SHM_DIR / f"{NAME_PREFIX}{EPOCH}-1-0"
    path.write_bytes(b"left")
    yield path
    path.unlink(missing_ok=True)


def test_a_region_that_was_attached_to_by_the_log_is_left_behind(region: Path) -> None:
    others = stale_regions() - {region}
    with pytest.raises(AssertionError, match=EPOCH):
        assert_nothing_left(others, f"level=info event=attached epoch={EPOCH} num_blocks=7\n")
    assert_nothing_left(others | {region}, f"level=info event=attached epoch={EPOCH} num_blocks=7\n")


def test_a_region_of_another_cluster_may_go_later(region: Path) -> None:
    others = stale_regions() - {region}
    threading.Timer(0.2, region.unlink).start()
    assert_nothing_left(others, "level=info event=attached epoch=0000000012345678 num_blocks=7\n")
    assert not region.exists()


def test_a_region_that_nobody_removes_is_left_behind(region: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.cluster.STOP_TIMEOUT_S", 0.2)
    with pytest.raises(AssertionError, match=EPOCH):
        assert_nothing_left(stale_regions() - {region}, "")
