"""A real Prometheus (Debian's) with the project's own configuration scrapes a cluster under a little load."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.monitoring.dashboard import PROMETHEUS, dashboard_queries, rules
from tests.support.observed import Observed, free_address, until

TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer. Raises `urllib.error.HTTPError` for a query that does not parse."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, query: str) -> list[float]:
        """The values of an instant query, one for each series."""
        return [float(series["value"][1]) for series in self.get("query", query=query)["result"]]

    @property
    def is_up(self) -> bool:
        try:
            self.get("status/runtimeinfo")
        except OSError:
            return False
        return True


@contextlib.contextmanager
def running_prometheus(directory: Path, targets: dict[str, str]) -> Iterator[Prometheus]:
    """Runs Prometheus with deploy/prometheus/local.yml, but scrapes `targets` (by job) every second."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not there: it is Debian's package of that name")
    for name in ("rules.yml", "alerts.yml"):
        shutil.copy(PROMETHEUS / name, directory)
    config = yaml.safe_load((PROMETHEUS / "local.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "500ms"}
    assert {job["job_name"] for job in config["scrape_configs"]} == targets.keys()
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = free_address()
    command = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--web.listen-address={address}"]
    command += [f"--storage.tsdb.path={directory}/data", "--log.level=warn"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    prometheus = Prometheus(address)
    try:
        until(lambda: process.poll() is not None or prometheus.is_up)
        assert process.poll() is None, (directory / "log").read_text()
        yield prometheus
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


@pytest.fixture(scope="module")
def prometheus(observed: Observed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    targets = {f"twostroke-{service}": address for service, address in observed.addresses.items()}
    targets["twostroke-gateway"] = observed.http_address
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), targets) as prometheus:
        until(lambda: prometheus.values('sum(up{job=~"twostroke-.*"})') == [4])
        yield prometheus


def test_prometheus_counts_the_tokens_that_clients_got(observed: Observed, prometheus: Prometheus) -> None:
    query = "sum(twostroke_gateway_generated_tokens_total)"
    observed.cluster.wait_idle()
    before = observed.scrape()["gateway"].value("twostroke_gateway_generated_tokens_total")
    until(lambda: prometheus.values(query) == [before])
    with ThreadPoolExecutor(4) as threads:
        answers = list(
            threads.map(lambda i: observed.cluster.generate(f"Count {i}", 60 + i, ignore_eos=True), range(8))
        )
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    assert num_tokens == sum(60 + i for i in range(8))
    until(lambda: prometheus.values(query) == [before + num_tokens])
    until(lambda: prometheus.values("twostroke:generated_tokens:rate1m > bool 0") == [1])
    until(lambda: prometheus.values("twostroke:time_to_first_token_seconds:p99 > bool 0") == [1])


def test_every_query_of_the_dashboard_is_answered(prometheus: Prometheus) -> None:
    def num_empty() -> int:
        return sum(prometheus.get("query", query=query)["result"] == [] for query in dashboard_queries())

    # Only ratios over events that have not happened in the last minutes may still be empty.
    until(lambda: num_empty() < len(dashboard_queries()) / 4)


def test_every_rule_is_evaluated_without_an_error(prometheus: Prometheus) -> None:
    def evaluated() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in evaluated()))
    assert {rule["name"] for rule in evaluated()} == {rule.get("record") or rule["alert"] for rule in rules()}
    assert [(rule["name"], rule.get("lastError")) for rule in evaluated() if rule["health"] != "ok"] == []
    alerts = {"TwostrokeStalled", "TwostrokeDown"}  # a scrape may be late once on a busy machine
    until(lambda: {rule["name"] for rule in evaluated() if rule.get("state") == "inactive"} >= alerts)
