"""The queries in deploy/prometheus and deploy/grafana."""

from __future__ import annotations

import functools
import json
import re

import yaml

from tests.support.cluster import REPOSITORY
from tests.support.scrape import read_table

PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
DASHBOARD = REPOSITORY / "deploy" / "grafana" / "dashboards" / "twostroke.json"
RATE_INTERVAL = "1m"


def dashboard_queries() -> list[str]:
    """Every query of the dashboard, with Grafana's variable filled in."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [query.replace("$__rate_interval", RATE_INTERVAL) for query in queries]


def rules() -> list[dict[str, str]]:
    """Recording rules and alerts."""
    files = [yaml.safe_load((PROMETHEUS / name).read_text()) for name in ("rules.yml", "alerts.yml")]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


@functools.cache
def known_names() -> frozenset[str]:
    """The names of all series that services serve or rules record."""
    names = {rule["record"] for rule in rules() if "record" in rule}
    for row in read_table():
        suffixes = ("_bucket", "_sum", "_count") if row.type == "histogram" else ("",)
        names |= {row.name + suffix for suffix in suffixes}
    return frozenset(names)


def unknown_names(query: str) -> set[str]:
    """Names of our metrics in `query` that no service serves and no rule records."""
    return set(re.findall(r"\btwostroke[_:][\w:]+", query)) - known_names()
