"""Renders the Grafana dashboard of deploy/grafana from its panels and the table of the metrics.

    PYTHONPATH=scripts python -m tables.grafana_dashboard            print it
    PYTHONPATH=scripts python -m tables.grafana_dashboard --write    write the file

tests/deploy/test_deploy_metrics.py compares the file with this output, and each name in it with the
server's metrics.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from moe_serve.http.metrics.table import METRICS
from tables.grafana_panels import ROWS, Panel, metric_names, query_text

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "grafana" / "moe-serve.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
HELP = {sample: row.help for row in METRICS for sample in row.sample_names}
WIDTH, PANEL_WIDTH, PANEL_HEIGHT = 24, 8, 8


def dashboard() -> dict[str, Any]:
    return {
        "uid": "moe-serve",
        "title": "moe-serve",
        "description": "Written by scripts/tables/grafana_dashboard.py.",
        "tags": ["moe-serve"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def render() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def _variables() -> list[dict[str, Any]]:
    """Returns the variables: the data source, and the servers to show (by default all)."""
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    ]
    for name, label in (("model_name", "Model"), ("instance", "Server")):
        query = f"label_values(moe_serve:num_requests_running, {name})"
        variables.append(
            {
                "name": name,
                "label": label,
                "type": "query",
                "datasource": SOURCE,
                "query": {"query": query, "refId": name},
                "refresh": 2,
                "sort": 1,
                "multi": True,
                "includeAll": True,
                "current": {"text": "All", "value": "$__all"},
            }
        )
    return variables


def _panels() -> list[dict[str, Any]]:
    """Returns the rows of panels, with three panels side by side."""
    placed: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS.items():
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        placed.append({"type": "row", "title": title, "collapsed": False, "gridPos": place})
        y += 1
        for i, panel in enumerate(panels):
            line, column = divmod(i, WIDTH // PANEL_WIDTH)
            placed.append(_panel(panel, column * PANEL_WIDTH, y + line * PANEL_HEIGHT))
        y += PANEL_HEIGHT * -(-len(panels) * PANEL_WIDTH // WIDTH)
    for number, item in enumerate(placed, start=1):
        item["id"] = number
    return placed


def _panel(panel: Panel, x: int, y: int) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": _description(panel),
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query_text(query), "legendFormat": legend}
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _description(panel: Panel) -> str:
    """Returns the panel's own text and the help texts of its metrics, a paragraph each."""
    names = [name for query in panel.queries.values() for name in metric_names(query)]
    helps = [f"`{name}`: {HELP[name]}" for name in dict.fromkeys(names)]
    return "\n\n".join([panel.about, *helps] if panel.about else helps)


def main() -> None:
    parser = argparse.ArgumentParser(description="The Grafana dashboard of deploy/grafana.")
    parser.add_argument("--write", action="store_true", help="write deploy/grafana/moe-serve.json")
    if parser.parse_args().write:
        FILE.write_text(render(), "utf-8")
    else:
        print(render(), end="")


if __name__ == "__main__":
    main()
