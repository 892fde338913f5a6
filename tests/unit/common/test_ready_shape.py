"""The shape of a model that another process has read, against the one that transformers reads here."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoConfig

from services.common import ready_shape
from services.common.config import EMBEDDED_MODEL, ModelSection
from services.common.encoders.encoder_config import read_encoder_config
from services.common.errors import ModelError
from services.common.model_config import load_model_config
from services.common.ready_shape import read_decoder, read_encoder, write_shape
from services.launch import shape_reader
from services.launch.child import start_process
from services.launch.shape_reader import reading_shape
from tests.support.model_configs import write_config

SECTION = ModelSection()
REPOSITORY = Path(__file__).parents[3]

WORKER = """
import asyncio, sys
from pathlib import Path
from services.common.config import ModelSection
from services.common.ready_shape import read_decoder

print(repr(asyncio.run(read_decoder(Path(sys.argv[1]), ModelSection()))))
assert not {"transformers", "huggingface_hub"} & set(sys.modules)
"""


def written(file: Path, path: Path = EMBEDDED_MODEL, num_layers: int | None = None) -> Path:
    with file.open("wb") as stream:
        write_shape(stream, path, num_layers)
    return file


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("config.json was read here")

    monkeypatch.setattr(ready_shape, "load_model_config", refuse)
    monkeypatch.setattr(ready_shape, "read_encoder_config", refuse)


def test_a_ready_shape_is_read_without_transformers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(written(tmp_path / "shape"))]
    found = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    assert found.stdout == f"{load_model_config(EMBEDDED_MODEL)!r}\n"


@pytest.mark.usefixtures("nothing_is_read")
def test_an_encoders_shape_is_ready_too(tmp_path: Path) -> None:
    path = tmp_path / "model"
    AutoConfig.for_model("bert", hidden_size=32, num_attention_heads=4, num_hidden_layers=2).save_pretrained(path)
    shape = asyncio.run(read_encoder(written(tmp_path / "shape", path), ModelSection(path=path)))
    assert shape == read_encoder_config(path)


def test_a_config_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = write_config(tmp_path / "model", "llama")
    file, section = written(tmp_path / "shape", path), ModelSection(path=path)
    (path / "config.json").write_text((path / "config.json").read_text().replace('"llama"', '"mistral"'))
    assert asyncio.run(read_decoder(file, section)).family == "mistral"


def test_a_shape_of_other_layers_is_not_taken(tmp_path: Path) -> None:
    file = written(tmp_path / "shape", num_layers=1)
    assert asyncio.run(read_decoder(file, ModelSection(num_layers=1))).num_layers == 1
    assert asyncio.run(read_decoder(file, SECTION)) == load_model_config(EMBEDDED_MODEL)


def test_a_reader_that_dies_anywhere_leaves_a_worker_that_reads_config_json(tmp_path: Path) -> None:
    file = written(tmp_path / "shape")
    whole = file.read_bytes()
    for size in (0, 1, 2, 11, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert asyncio.run(read_decoder(file, SECTION)) == load_model_config(EMBEDDED_MODEL), size
    assert asyncio.run(read_decoder(tmp_path / "none", SECTION)) == load_model_config(EMBEDDED_MODEL)


def test_a_reader_that_hangs_holds_up_a_worker_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_shape, "READ_TIMEOUT_S", 0.05)
    with written(tmp_path / "shape").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert asyncio.run(read_decoder(Path(held.name), SECTION)) == load_model_config(EMBEDDED_MODEL)


def test_an_unusable_config_is_reported_by_the_worker(tmp_path: Path) -> None:
    section = ModelSection(path=write_config(tmp_path, "llama", hidden_act="tanh"))
    with pytest.raises(ModelError, match="tanh"):
        written(tmp_path / "shape", section.path)
    with pytest.raises(ModelError, match="tanh"):
        asyncio.run(read_decoder(tmp_path / "shape", section))


@pytest.mark.usefixtures("nothing_is_read")
def test_a_worker_waits_for_the_launchers_reader(tmp_path: Path) -> None:
    with reading_shape(SECTION, tmp_path / "shape", start_process):
        shape = asyncio.run(read_decoder(tmp_path / "shape", SECTION))
    assert shape == load_model_config(EMBEDDED_MODEL)


@contextlib.contextmanager
def hanging_reader(file: Path) -> Iterator[int]:
    """The process id of one."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*_: object, files: list[int]) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "1000"], pass_fds=files))
        return started[0]

    with reading_shape(SECTION, file, start):
        yield started[0].pid


def test_a_killed_reader_lets_workers_go_on_and_leaves_no_process(tmp_path: Path) -> None:
    with hanging_reader(tmp_path / "shape") as pid:
        os.kill(pid, signal.SIGKILL)
        assert asyncio.run(read_decoder(tmp_path / "shape", SECTION)) == load_model_config(EMBEDDED_MODEL)
        while Path(f"/proc/{pid}").exists():  # the launcher has taken its status
            time.sleep(0.01)


def test_a_reader_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_reader, "MAX_READING_S", 0.2)
    with hanging_reader(tmp_path / "shape") as pid:
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)
        assert asyncio.run(read_decoder(tmp_path / "shape", SECTION)) == load_model_config(EMBEDDED_MODEL)


def test_the_end_of_the_launcher_ends_a_reader_that_hangs(tmp_path: Path) -> None:
    with hanging_reader(tmp_path / "shape") as pid:
        pass
    assert not Path(f"/proc/{pid}").exists()
