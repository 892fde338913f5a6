"""A cluster with metrics of every service, a step log, and traces to a collector in the test."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.support.cluster import Cluster, free_port, running_cluster
from tests.support.monitoring.otlp_collector import Collector, running_collector
from tests.support.scrape import Scrape

SERVICES = ("gateway", "dense", "attention", "launch")
TIMEOUT_S = 60.0


@dataclass
class Observed:
    """The cluster, with the addresses of its metrics and the files of its logs."""

    cluster: Cluster
    addresses: dict[str, str]  # where each service serves its metrics, by service
    http_address: str
    step_log: Path
    collector: Collector

    def scrape(self) -> dict[str, Scrape]:
        """Reads the metrics of all services at about the same time."""
        return {service: Scrape(address) for service, address in self.addresses.items()}


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S} s"
        time.sleep(0.05)



@contextlib.contextmanager
def running_observed(directory: Path) -> Iterator[Observed]:
    """Runs a cluster and sends it one request that is refused, so that the counter of refusals has a label."""
    addresses = {service: free_address() for service in SERVICES}
    http_address, step_log = free_address(), directory / "steps.jsonl"
    settings = [f"{service}.metrics_address={address}" for service, address in addresses.items()]
    settings += [f"gateway.http_address={http_address}", f"dense.step_log={step_log}", "gateway.resume=true"]
    with (
        running_collector() as collector,
        running_cluster(directory, *settings, f"tracing.endpoint={collector.endpoint}", is_warm=True) as cluster,
    ):
        with pytest.raises(grpc.RpcError):
            cluster.generate("a", 5, temperature=-1.0)
        yield Observed(cluster, addresses, http_address, step_log, collector)
