"""Reads `/metrics` as Prometheus does, and the table that documents the metrics."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.cluster import REPOSITORY, REQUEST_TIMEOUT_S

TABLE = REPOSITORY / "deploy" / "prometheus" / "metrics.md"


@dataclass(frozen=True)
class Row:
    """One metric, read from the table or from a service."""

    name: str
    type: str
    labels: frozenset[str]
    services: frozenset[str]
    meaning: str


class Scrape:
    """All metrics of one service at one time."""

    def __init__(self, address: str) -> None:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=REQUEST_TIMEOUT_S) as response:
            self.families: list[Metric] = list(text_string_to_metric_families(response.read().decode()))

    def value(self, name: str, **labels: str) -> float:
        """Sum of all samples of that name with these labels; fails if there is none."""
        values = [
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert values, f"{name}{labels} is not served"
        return sum(values)

    def rows(self, service: str) -> Iterator[Row]:
        """The rows that the table should have for this service."""
        for family in self.families:
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield Row(name, family.type, frozenset(labels), frozenset([service]), family.documentation)


def read_table() -> list[Row]:
    """The rows of `deploy/prometheus/metrics.md`."""
    rows = []
    for line in TABLE.read_text().splitlines():
        if not line.startswith("| `"):
            continue
        name, kind, _, labels, services, meaning = (cell.strip() for cell in line.strip("| ").split("|"))
        rows.append(
            Row(
                name.strip("`"),
                kind,
                frozenset(re.findall(r"`(\w+)`", labels)),
                frozenset(services.split(", ")),
                meaning,
            )
        )
    return rows


def read_units() -> dict[str, str]:
    """The unit of every metric of the table, by name."""
    cells = [line.split("|") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    return {each[1].strip(" `"): each[3].strip() for each in cells}
