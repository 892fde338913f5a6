"""`AllProcesses`: what the gateway processes of a server measure, for a scraper that reaches any of them.

The kernel gives each connection to one of them, so counts of the one that a scrape reaches would jump. Each process
tells its own at the socket for its peers, and the one that is reached tells all, with a label for the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from services.gateway.link.gateway_peers import GatewayPeers
from services.gateway.metrics import sglang_metrics
from services.gateway.metrics.pool_metrics import NAMES
from services.gateway.metrics.vllm_metrics import COPIES, PREFIX
from services.gateway.resources.shared_call import SharedCall
from services.pb import gateway_peers_pb2
from services.rpc.metrics import format_for

T = TypeVar("T")

LABEL = "process"
# What every process tells alike, since it is the workers': told once, by the process that is reached.
OF_WORKERS = NAMES | sglang_metrics.NAMES | {PREFIX + copy for name in NAMES for copy in COPIES.get(name, ())}
MAX_AGE_S = 0.5  # the other processes are not asked more often, however many clients ask: these need no key


class AllProcesses:
    """Used in the event loop. Metrics are collected in a thread, because some of them ask the workers."""

    def __init__(
        self,
        registry: CollectorRegistry,
        count_open_requests: Callable[[], int],
        peers: GatewayPeers,
        process_index: int,
    ) -> None:
        """`registry`, `count_open_requests`: of this process."""
        self._registry = registry
        self._count_open_requests = count_open_requests
        self._peers = peers
        self._process_index = process_index
        self._thread = ThreadPoolExecutor(1, "metrics")
        self._own = SharedCall(self._collect_own, MAX_AGE_S if peers.has_any else 0.0)
        self._all = SharedCall(self._collect_all, MAX_AGE_S)
        self._loads = SharedCall(lambda: peers.measure(has_metrics=False), MAX_AGE_S)

    async def own(self, *, has_metrics: bool) -> gateway_peers_pb2.MeasureResponse:
        """What this process tells its peers."""
        response = gateway_peers_pb2.MeasureResponse(
            process_index=self._process_index, num_open_requests=self._count_open_requests()
        )
        if has_metrics:
            response.metrics = await self._in_thread(generate_latest, _Collected(await self._own.read()))
        return response

    async def num_open_requests(self) -> int:
        """Requests that the processes have accepted and not answered completely; of others `MAX_AGE_S` ago."""
        others = await self._loads.read() if self._peers.has_any else []
        return self._count_open_requests() + sum(each.num_open_requests for each in others)

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """The metrics as the header Accept asks for them, and their content type. A process that hangs is left out."""
        encode, content_type = choose_encoder(format_for(accept))
        families = await (self._all if self._peers.has_any else self._own).read()
        return await self._in_thread(encode, _Collected(families)), content_type

    async def close(self) -> None:
        """Cancels what runs."""
        for each in (self._loads, self._all, self._own):
            await each.close()
        self._thread.shutdown(wait=False, cancel_futures=True)  # the thread may wait for this event loop

    async def _collect_own(self) -> list[Metric]:
        return await self._in_thread(lambda: list(self._registry.collect()))

    async def _collect_all(self) -> list[Metric]:
        others = await self._peers.measure(has_metrics=True)
        own = await self._own.read()
        return await self._in_thread(self._merge, own, {each.process_index: each.metrics for each in others})

    def _merge(self, own: list[Metric], texts: dict[int, bytes]) -> list[Metric]:
        """The metrics of all processes as one's: the samples of each have a label more."""
        others = {index: list(text_string_to_metric_families(text.decode())) for index, text in texts.items()}
        merged: dict[str, Metric] = {}
        for index, families in sorted((others | {self._process_index: own}).items()):
            for family in families:
                if family.name not in OF_WORKERS:
                    into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                    into.samples += _labelled(family, index)
                elif index == self._process_index:
                    merged[family.name] = family
        return list(merged.values())

    async def _in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)


class _Collected(Collector):
    """Metrics that were collected before."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _labelled(family: Metric, index: int) -> Iterable[object]:
    return [sample._replace(labels={**sample.labels, LABEL: str(index)}) for sample in family.samples]
