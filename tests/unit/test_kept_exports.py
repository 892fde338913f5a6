"""What is kept of exports is found again only for the same arguments and sources, by any process."""

from __future__ import annotations

import importlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.dense_worker.tensorrt import onnx_segments
from services.dense_worker.tensorrt.api import TensorRT
from tests.support.dense.kept_exports import MAX_UNUSED_S, KeptFiles
from tests.support.imports import MODULES, as_in_a_new_process, sources_of


class Maker:
    """Makes different bytes each time."""

    def __init__(self) -> None:
        self.num_made = 0

    def __call__(self) -> bytes:
        self.num_made += 1
        return b"%d" % self.num_made


def test_another_process_finds_what_was_made(tmp_path: Path) -> None:
    make = Maker()
    for _ in range(2):
        kept = KeptFiles(tmp_path, "sources 1")
        assert [kept.find_or_make(make, 1, "a") for _ in range(2)] == [b"1", b"1"]
    assert make.num_made == 1


@pytest.mark.parametrize(("origin", "arguments"), [("sources 2", (1, "a")), ("sources 1", (1, "b")), ("sources 1", ())])
def test_other_sources_and_arguments_make_their_own(tmp_path: Path, origin: str, arguments: tuple[object, ...]) -> None:
    make = Maker()
    assert KeptFiles(tmp_path, "sources 1").find_or_make(make, 1, "a") == b"1"
    assert KeptFiles(tmp_path, origin).find_or_make(make, *arguments) == b"2"
    assert KeptFiles(tmp_path, "sources 1").find_or_make(make, 1, "a") == b"1"


def test_those_who_write_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    made = [bytes([number]) * 1_000_000 for number in range(8)]
    kept = KeptFiles(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda data: kept.find_or_make(lambda: data), made))
    assert all(each in made for each in found)
    [path] = tmp_path.iterdir()
    assert path.read_bytes() in made


def test_what_was_not_used_for_a_day_is_removed(tmp_path: Path) -> None:
    kept, make = KeptFiles(tmp_path), Maker()
    for name in ("used", "unused"):
        kept.find_or_make(make, name)
    for path in tmp_path.iterdir():
        time = path.stat().st_mtime - MAX_UNUSED_S - 1
        os.utime(path, (time, time))
    kept.find_or_make(make, "used")
    assert [KeptFiles(tmp_path).find_or_make(make, name) for name in ("used", "unused")] == [b"1", b"3"]


def test_the_sources_contain_all_that_an_export_and_a_build_import() -> None:
    names = onnx_segments.__name__, TensorRT.__module__
    with as_in_a_new_process():
        for name in names:
            importlib.import_module(name)
        own = {name for name in sys.modules if name in MODULES}
    assert len(own) > 50 and own <= sources_of(names).keys()
    assert not [name for name in sources_of(names) if name.startswith("services.gateway")]
