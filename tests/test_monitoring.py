"""Board, alerts, runbook and the table of metrics speak of the same metrics, and of those that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from balancer.rank_health import RankState
from gateway.metrics import RANK_STATES, RequestMetrics
from gateway.status import FrontEndStatus, RankStatus, StatusSnapshot

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = (ROOT / "docs/monitoring.md").read_text()
BOARD = json.loads((ROOT / "configs/grafana/gateway.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((ROOT / "configs/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
ALERTS = {rule["alert"]: rule["expr"] for rule in RULES if "alert" in rule}
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


def exposed(prefix: str = "") -> dict[str, tuple[str, frozenset[str]]]:
    """Type and labels of every metric of ours, by name as it is scraped, but histograms by theirs."""
    snapshot = StatusSnapshot(
        version="1", mode="m", model="tiny", uptime_s=1.0, state="ready", max_loras=1,
        front_ends=(FrontEndStatus(index=0, pid=1), FrontEndStatus(index=1, pid=2)),
        ranks=(RankStatus(rank=0, epoch=1, state="ready", last_seen_s=1.0, signal_age_ms=1.0, num_kv_blocks=9),),
    )  # fmt: skip
    found = {}
    for family in text_string_to_metric_families(RequestMetrics().render(snapshot, prefix).decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        found[name] = family.type, frozenset(family.samples[0].labels.keys() - {"model_name", "le"})
    return found


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*) ?\|", DOCUMENT, re.MULTILINE)
    return {name: (kind, frozenset(filter(None, re.split(r"[, ]+", labels)))) for name, kind, labels in rows}


def test_the_table_has_every_metric_with_its_type_and_labels() -> None:
    assert documented() == exposed()


@pytest.mark.parametrize("expression", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_board_and_alerts_ask_for_what_is_there(expression: str) -> None:
    metrics, names = exposed(), re.findall(r"gateway:(\w+)", expression.replace("instance:gateway_requests_queued:sum", ""))
    for name in names:
        histogram = re.sub(r"_(bucket|sum|count)$", "", name)
        assert name in metrics or metrics.get(histogram, ("", ()))[0] == "histogram", name
    assert names or "instance:gateway_requests_queued:sum" in expression or expression.startswith("up{")


def test_every_alert_has_its_page_of_the_runbook_and_every_page_its_alert() -> None:
    assert re.findall(r"^### (Gateway\w+)$", DOCUMENT, re.MULTILINE) == list(ALERTS)


def test_states_are_those_of_the_status_document() -> None:
    assert set(RANK_STATES) == {state.value for state in RankState}


def test_no_two_panels_of_the_board_have_one_place_or_one_id() -> None:
    """Grafana moves such panels, or shows one of them only."""
    panels = BOARD["panels"]
    places = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(places) == len(set(places))
    assert all(0 <= x < 24 for x, _ in places)
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {query["datasource"]["uid"] for panel in panels for query in panel.get("targets", [])} == {"${datasource}"}
