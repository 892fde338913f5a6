"""`LaunchMetrics`: the Prometheus metrics of the launcher's services; see `deploy/prometheus/metrics.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from services.launch.child import Child
from services.launch.standby import Standby
from services.pb import launch_pb2


class LaunchMetrics:
    """Reads the children when a scraper asks, on the scraper's thread."""

    def __init__(
        self,
        registry: CollectorRegistry,
        read_children: Callable[[], Iterable[Child]],
        standbys: Sequence[Standby] = (),
    ) -> None:
        self._read_children = read_children
        self._standbys = standbys
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
        yield from self._collect_standbys()

    def _collect_standbys(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily(
            "twostroke_launch_standby_ready",
            "1 while a standby of each worker could take over at once, else 0.",
            labels=["role"],
        )
        memory = GaugeMetricFamily(
            "twostroke_launch_standby_bytes",
            "Memory that standbys take, of the host (shared pages in equal parts) or of their GPUs.",
            labels=["role", "memory"],
        )
        take_overs = CounterMetricFamily(
            "twostroke_launch_take_overs", "Times a standby took over from a worker that had died.", labels=["role"]
        )
        by_role: dict[str, list[launch_pb2.StandbyStatus]] = {}
        for status in (standby.status() for standby in self._standbys):
            by_role.setdefault(status.role, []).append(status)
        for role, of_ranks in by_role.items():
            ready.add_metric([role], int(all(each.state == launch_pb2.StandbyStatus.READY for each in of_ranks)))
            memory.add_metric([role, "host"], sum(each.host_bytes for each in of_ranks))
            memory.add_metric([role, "gpu"], sum(each.device_bytes for each in of_ranks))
            take_overs.add_metric([role], sum(each.num_take_overs for each in of_ranks))
        yield from (ready, memory, take_overs)
