"""`LaunchMetrics`: the Prometheus metrics of the launcher's services; see `deploy/prometheus/metrics.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


class ChildCounts(Protocol):
    """The state of a `Child` that metrics read."""

    role: str
    num_restarts: int
    is_running: bool


class LaunchMetrics:
    """Reads the children when a scraper asks, on the scraper's thread."""

    def __init__(self, registry: CollectorRegistry, read_children: Callable[[], Iterable[ChildCounts]]) -> None:
        self._read_children = read_children
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; called by the registry."""
        restarts = CounterMetricFamily(
            "twostroke_launch_restarts", "Times a service was started again, in all.", labels=["role"]
        )
        running = GaugeMetricFamily(
            "twostroke_launch_services_running", "Processes of a service that run now.", labels=["role"]
        )
        by_role: dict[str, tuple[int, int]] = {}
        for child in self._read_children():
            num_restarts, num_running = by_role.get(child.role, (0, 0))
            by_role[child.role] = num_restarts + child.num_restarts, num_running + child.is_running
        for role, (num_restarts, num_running) in by_role.items():
            restarts.add_metric([role], num_restarts)
            running.add_metric([role], num_running)
        yield restarts
        yield running
