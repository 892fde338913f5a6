"""Prometheus's configuration, rules and alerts, and Grafana's dashboard, are valid and use metrics that exist."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.compose_file import load_compose
from tests.support.monitoring.dashboard import DASHBOARD, PROMETHEUS, dashboard_queries, rules, unknown_names

TIMEOUT_S = 60.0
PROVISIONING = DASHBOARD.parents[1] / "provisioning"


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not there: it comes with Debian's package prometheus")
    return subprocess.run(
        ["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=TIMEOUT_S
    )


@pytest.mark.parametrize("name", ["prometheus.yml", "local.yml"])
def test_promtool_accepts_the_configuration(name: str) -> None:
    result = promtool("check", "config", name)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "rules found" in result.stdout


def test_rules_and_alerts_pass_their_tests() -> None:
    result = promtool("test", "rules", "rules_test.yml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_tests_of_the_rules_would_find_a_mistake(tmp_path: Path) -> None:
    for file in PROMETHEUS.glob("*.yml"):
        shutil.copy(file, tmp_path)
    alerts = tmp_path / "alerts.yml"
    alerts.write_text(alerts.read_text().replace("rate(twostroke_dense_steps_total[1m]) == 0", "vector(0) == 0"))
    assert promtool("test", "rules", str(tmp_path / "rules_test.yml")).returncode != 0


def test_every_alert_is_tested() -> None:
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
    fired = {
        case["alertname"] for test in tests for case in test.get("alert_rule_test", ()) if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("record") or rule["alert"])
def test_a_rule_asks_for_metrics_that_exist(rule: dict[str, str]) -> None:
    assert unknown_names(rule["expr"]) == set()


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    queries = dashboard_queries()
    assert len(queries) > 40
    assert {query: unknown_names(query) for query in queries if unknown_names(query)} == {}
    assert unknown_names("rate(twostroke_gateway_answer_total[1m])"), "a misspelt name was not found"


def test_panels_do_not_overlap_and_name_the_provisioned_data_source() -> None:
    [source] = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        box = panel["gridPos"]
        cells = {(box["x"] + x, box["y"] + y) for x in range(box["w"]) for y in range(box["h"])}
        assert not cells & taken and box["x"] + box["w"] <= 24, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == source["uid"]


def test_scraped_names_and_mounted_directories_are_those_of_the_compose_files() -> None:
    for file in ("compose.yaml", "compose.cuda.yaml"):
        services = load_compose(file)["services"]
        jobs = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
        hosts = {target.split(":")[0] for job in jobs for each in job["static_configs"] for target in each["targets"]}
        assert hosts <= services.keys()
        [provider] = yaml.safe_load((PROVISIONING / "dashboards" / "twostroke.yml").read_text())["providers"]
        mounts = json.dumps(services["grafana"]["volumes"])
        assert provider["options"]["path"] in mounts and "/etc/grafana/provisioning" in mounts
