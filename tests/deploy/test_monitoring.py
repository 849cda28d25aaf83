"""Dashboard and alerts use only metrics that a running server has, by the names it gives them."""

import json
import re
import shutil
import subprocess
import urllib.request
from typing import Any

import pytest
import yaml

from tests.deploy.proxy import DEPLOY, replicas

FOLDER = DEPLOY / "monitoring"
METRIC = re.compile(r"\b(?:vllm|srv):[a-zA-Z0-9_]+")


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    return loaded


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


@pytest.fixture(scope="module")
def exported() -> dict[str, str]:
    """Type of each metric of a live server, by the names that queries use."""
    with (
        replicas("a") as (replica,),
        urllib.request.urlopen(replica.url + "/metrics") as response,
    ):
        text = response.read().decode()
    families = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    parts = {
        f"{name}_{part}": "histogram"
        for name, kind in families.items()
        if kind == "histogram"
        for part in ("bucket", "sum", "count")
    }
    return families | parts


def test_every_panel_asks_for_what_exists(exported: dict[str, str]) -> None:
    expressions = [t["expr"] for panel in dashboard()["panels"] for t in panel["targets"]]
    expressions += [v["query"] for v in dashboard()["templating"]["list"] if v["type"] == "query"]
    used = {name for expression in expressions for name in METRIC.findall(expression)}
    assert len(used) > 15
    assert sorted(used - exported.keys()) == []


def test_every_alert_asks_for_what_exists(exported: dict[str, str]) -> None:
    for rule in rules():
        used = set(METRIC.findall(rule["expr"]))
        assert used or "up{" in rule["expr"], rule["alert"]
        assert used <= exported.keys(), (rule["alert"], used - exported.keys())
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "action"}
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) > 8


def test_only_counters_are_rated(exported: dict[str, str]) -> None:
    expressions = [t["expr"] for panel in dashboard()["panels"] for t in panel["targets"]]
    expressions += [rule["expr"] for rule in rules()]
    for expression in expressions:
        for name in re.findall(r"(?:rate|increase|resets)\(([a-z0-9_:]+)", expression):
            assert exported[name] in ("counter", "histogram"), name


def test_panels_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}
    assert len(places) == len({p["id"] for p in panels}) == len(panels)


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed; the Debian package `prometheus` has it",
)
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(
        ["promtool", "check", "config", str(FOLDER / "prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
