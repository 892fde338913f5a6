"""The launcher's metrics of its services, by role."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from services.launch.metrics import LaunchMetrics


@dataclass
class FakeChild:
    role: str
    num_restarts: int
    is_running: bool


def test_the_processes_of_a_role_are_added() -> None:
    registry = CollectorRegistry()
    children = [FakeChild("dense_worker", 2, False), FakeChild("gateway", 1, True), FakeChild("gateway", 0, True)]
    LaunchMetrics(registry, lambda: children)

    def values(name: str) -> list[float | None]:
        return [registry.get_sample_value(name, {"role": role}) for role in ("dense_worker", "gateway")]

    assert values("twostroke_launch_restarts_total") == [2, 1]
    assert values("twostroke_launch_services_running") == [0, 2]
    children[0].num_restarts += 1
    assert values("twostroke_launch_restarts_total") == [3, 1]
