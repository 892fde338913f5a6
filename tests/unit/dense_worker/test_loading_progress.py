"""What a dense worker reports of itself while it loads, and what it does once it has."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.child_options import ChildOptions, Standby
from services.common.config import load_config
from services.common.errors import ConfigError
from services.dense_worker import service
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.grammar.grammar_feature import GrammarFeature
from services.dense_worker.service import DenseWorker
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc.client import open_channel
from services.rpc.metrics import new_registry, serving_metrics

LINE = "[2/3] middle: building, no plan yet"


@pytest.mark.parametrize(("standby", "function"), [(None, "load_model"), ("auto", "prepare_model")])
def test_the_progress_of_a_build_is_in_the_status_while_it_loads(
    standby: Standby | None, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_seen = threading.Event()

    def load(config: Any, resolved: Any, report: Callable[[str], None], lifeline: None) -> None:
        report(LINE)
        assert is_seen.wait(60.0)
        raise ConfigError("it cannot be built")

    monkeypatch.setattr(service, function, load)
    config = load_config(None, [f"dense.address=unix:{tmp_path}/dense.sock", "dense.device=cpu"])

    async def main() -> None:
        worker = DenseWorker(config, ChildOptions(standby=standby))
        starting = asyncio.create_task(worker.start())
        async with open_channel(config.dense.address, config.peers.max_message_bytes) as channel:
            stub = dense_pb2_grpc.DenseWorkerStub(channel)
            status = dense_pb2.DenseStatus()
            while status.loading != LINE and not starting.done():
                request = dense_pb2.GetStatusRequest()
                status = await stub.GetStatus(request, wait_for_ready=True, timeout=30.0)
        is_seen.set()
        with pytest.raises(ConfigError, match="it cannot be built"):
            await starting
        assert status.state == dense_pb2.DenseStatus.LOADING
        await worker.stop()

    asyncio.run(main())


@pytest.mark.parametrize("has_predecessor", [True, False])
def test_only_a_worker_that_replaces_another_starts_while_its_metrics_address_is_in_use(
    has_predecessor: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that it replaces still serves metrics there while it stops."""

    def load(config: Any, resolved: Any, report: Callable[[str], None], lifeline: None) -> None:
        raise ConfigError("it begins to load")

    monkeypatch.setattr(service, "load_model", load)

    async def main() -> None:
        with serving_metrics("127.0.0.1:0", new_registry("dense"), "dense.metrics_address") as address:
            settings = [f"dense.address=unix:{tmp_path}/dense.sock", "dense.device=cpu"]
            config = load_config(None, [*settings, f"dense.metrics_address={address}"])
            worker = DenseWorker(config, ChildOptions(has_predecessor=has_predecessor))
            with pytest.raises(ConfigError, match="begins to load" if has_predecessor else "port in use"):
                await worker.start()
            await worker.stop()

    asyncio.run(main())


def test_a_worker_that_has_stopped_does_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0

    def read_ahead(feature: Feature) -> None:
        nonlocal num_read
        num_read += 1

    monkeypatch.setattr(Feature, "read_ahead", read_ahead)
    monkeypatch.setattr(GrammarFeature, "read_ahead", read_ahead)
    monkeypatch.setattr(service, "READ_AHEAD_S", 0.2)
    config = load_config(None, [f"dense.address=unix:{tmp_path}/dense.sock", "dense.device=cpu"])

    async def main() -> None:
        for stops_at_once in (True, False):
            worker = DenseWorker(config, ChildOptions())
            await worker.start()
            if stops_at_once:
                await worker.stop()
            await asyncio.sleep(0.4)
            assert bool(num_read) != stops_at_once
        await worker.stop()

    asyncio.run(main())
