"""`AllProcesses`: what the gateway processes of a server measure, for a scraper that reaches any of them.

The kernel gives each connection to one of them, so counts of the one that a scrape reaches would jump. Each process
tells its own at the socket for its peers, and the one that is reached tells all, with a label for the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from services.gateway.link.gateway_peers import GatewayPeers
from services.pb import gateway_peers_pb2

LABEL = "process"
OF_WORKERS = "vllm:"  # the names of what every process tells alike


class AllProcesses:
    """Used in the event loop. Metrics are collected in threads, because some of them ask the workers."""

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

    async def own(self, *, has_metrics: bool) -> gateway_peers_pb2.MeasureResponse:
        """What this process tells its peers."""
        response = gateway_peers_pb2.MeasureResponse(
            process_index=self._process_index, num_open_requests=self._count_open_requests()
        )
        if has_metrics:
            response.metrics = await asyncio.to_thread(generate_latest, self._registry)
        return response

    async def num_open_requests(self) -> int:
        """Requests that the processes have accepted and not answered completely."""
        others = await self._peers.measure(has_metrics=False)
        return self._count_open_requests() + sum(each.num_open_requests for each in others)

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """The metrics as the header Accept asks for them, and their content type. A process that hangs is left out."""
        encode, content_type = choose_encoder(accept)
        others = await self._peers.measure(has_metrics=True)
        if not self._peers.has_any:
            return await asyncio.to_thread(encode, self._registry), content_type
        texts = {each.process_index: each.metrics.decode() for each in others}
        return await asyncio.to_thread(self._encode_all, encode, texts), content_type

    def _encode_all(self, encode: Callable[[Collector], bytes], texts: dict[int, str]) -> bytes:
        families = {self._process_index: list(self._registry.collect())}
        families |= {index: list(text_string_to_metric_families(text)) for index, text in texts.items()}
        return encode(_Merged(self._process_index, dict(sorted(families.items()))))


class _Merged(Collector):
    """The metrics of several processes as one's: the samples of each have a label more."""

    def __init__(self, own_index: int, families: dict[int, list[Metric]]) -> None:
        self._own_index = own_index
        self._families = families  # by process

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for index, families in self._families.items():
            for family in families:
                if not family.name.startswith(OF_WORKERS):
                    into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                    into.samples += _labelled(family, index)
                elif index == self._own_index:
                    merged[family.name] = family
        yield from merged.values()


def _labelled(family: Metric, index: int) -> Iterable[object]:
    return [sample._replace(labels={**sample.labels, LABEL: str(index)}) for sample in family.samples]
