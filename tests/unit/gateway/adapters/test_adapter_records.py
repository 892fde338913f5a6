"""What clients have loaded is served again after a restart, whatever has happened to the files."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from services.common.config import EMBEDDED_MODEL
from services.common.errors import NotFound
from services.common.model_config import load_model_config
from services.gateway.access.access import Caller
from services.gateway.access.rate_limits import RateLimits, Usage
from services.gateway.adapters.adapters import Adapters
from services.gateway.link.gateway_peers import GatewayPeers
from services.gateway.request.model_limits import ModelNames
from services.lora.adapter import Adapter
from services.lora.adapter_records import DIRECTORY, NEW_PREFIX, AdapterRecords
from services.lora.shapes import adapted_shapes
from tests.support.adapters import make_adapter

ANYBODY = Caller(None, Usage("", RateLimits()))
SHAPES = adapted_shapes(load_model_config(EMBEDDED_MODEL))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for seed, name in enumerate(("a", "b", "c")):
        make_adapter(tmp_path / name, EMBEDDED_MODEL, rank=4, modules=("q_proj",), seed=seed)
    return tmp_path


async def started(directory: Path, modules: Iterable[str] = ()) -> Adapters:
    """The adapters of a gateway that has just started."""
    names = ModelNames(("model",), accepts_any=False, root="/model")
    adapters = Adapters(names, SHAPES, 64, 64, directory, GatewayPeers())
    await adapters.load_configured(modules)
    await adapters.load_recorded(())
    return adapters


def loaded(adapters: Adapters) -> Mapping[str, Adapter]:
    return adapters.names_for(ANYBODY).adapters


def paths(adapters: Adapters) -> dict[str, str]:
    """The names of the directories, by name of the adapter."""
    return {name: Path(each.path).name for name, each in loaded(adapters).items()}


def test_a_restarted_gateway_has_what_clients_have_loaded(directory: Path) -> None:
    async def body() -> None:
        first = await started(directory)
        for name, path in (("x", "a"), ("y", str(directory / "b")), ("z/\u00fc", "c")):
            await first.load(ANYBODY, name, path)
        await first.load(ANYBODY, "x", "c", replaces=True)
        await first.unload(ANYBODY, "y")
        second = await started(directory)
        assert paths(second) == {"x": "c", "z/\u00fc": "c"}
        assert {each.hash for each in loaded(second).values()} == {loaded(first)["x"].hash}
        with pytest.raises(NotFound):
            await second.unload(ANYBODY, "y")
        await second.unload(ANYBODY, "x")
        assert paths(await started(directory)) == {"z/\u00fc": "c"}

    asyncio.run(body())


def test_peers_that_change_different_names_at_once_lose_nothing(directory: Path) -> None:
    async def body() -> None:
        gateways = [await started(directory) for _ in range(3)]
        await asyncio.gather(*(each.load(ANYBODY, f"{i}", "abc"[i]) for i, each in enumerate(gateways)))
        await asyncio.gather(gateways[0].unload(ANYBODY, "0"), gateways[1].load(ANYBODY, "3", "a"))
        assert paths(await started(directory)) == {"1": "b", "2": "c", "3": "a"}

    asyncio.run(body())


def test_what_a_client_has_replaced_stays_replaced_and_what_it_has_unloaded_is_configured(directory: Path) -> None:
    async def body() -> None:
        modules = (f"x={directory / 'a'}", f"y={directory / 'b'}")
        first = await started(directory, modules)
        await first.load(ANYBODY, "x", "c", replaces=True)
        await first.unload(ANYBODY, "y")
        assert paths(await started(directory, modules)) == {"x": "c", "y": "b"}

    asyncio.run(body())


def test_records_that_cannot_be_loaded_keep_no_gateway_from_its_start(directory: Path) -> None:
    async def body() -> None:
        first = await started(directory)
        for name in ("a", "b", "c"):
            await first.load(ANYBODY, name, name)
        shutil.rmtree(directory / "a")
        records = AdapterRecords(directory)
        records.write("", "model", Path("c"))  # a name of the served model
        for name, path in (("outside", "../b"), ("absolute", "/etc")):
            records.write("", name, Path(path))
        written = directory / DIRECTORY
        (written / "tmp1234").write_text('{"name": "half')  # a crash before the rename
        for index, content in enumerate(("", "[]", '{"name": 1, "path": "b"}', '{"name": "b"}', "[" * 10_000)):
            (written / f"{index}.json").write_text(content)
        (written / "folder.json").mkdir()
        assert paths(await started(directory)) == {"b": "b", "c": "c"}

    asyncio.run(body())


def test_an_adapter_is_served_where_nothing_can_be_recorded(directory: Path) -> None:
    (directory / DIRECTORY).write_text("a file in the place of the directory")

    async def body() -> None:
        first = await started(directory)
        await first.load(ANYBODY, "x", "a")
        assert paths(first) == {"x": "a"}
        await first.unload(ANYBODY, "x")
        assert paths(await started(directory)) == {}

    asyncio.run(body())


def test_a_record_is_replaced_whole(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash while the new one is written leaves the old one."""
    records = AdapterRecords(directory)
    records.write("", "x", Path("a"))

    def crash(content: object, file: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", crash)
    with pytest.raises(KeyboardInterrupt):
        records.write("", "x", Path("b"))
    assert records.read() == [("", "x", "a")] and len(list((directory / DIRECTORY).iterdir())) == 1


def test_what_a_process_has_left_that_was_killed_while_it_wrote_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    records = AdapterRecords(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(os, "unlink", lambda _: None)  # it has no time to tidy up
        with pytest.raises(KeyboardInterrupt):
            records.write("", "x", Path("a"))
    [left] = (tmp_path / DIRECTORY).iterdir()
    records.write("", "y", Path("b"))
    assert left.exists(), "another process may be about to rename it"
    os.utime(left, (0, 0))
    records.write("", "y", Path("b"))
    assert not left.exists() and records.read() == [("", "y", "b")]


def test_what_cannot_be_removed_keeps_no_record_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    records = AdapterRecords(tmp_path)
    records.write("", "x", Path("a"))
    left = tmp_path / DIRECTORY / f"{NEW_PREFIX}of-another-user"
    left.touch()
    os.utime(left, (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        records.write("", "y", Path("b"))
    assert records.read() == [("", "x", "a"), ("", "y", "b")]
