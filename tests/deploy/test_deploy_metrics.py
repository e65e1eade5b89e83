"""The dashboard and the alerts use only metrics, labels and values that /metrics has."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from moe_serve.http.metrics.scrape import MODEL_LABEL, PREFIX
from moe_serve.http.metrics.table import METRICS
from tables import grafana_dashboard, metrics_table
from tables.grafana_panels import query_text
from tests.support.http.full_metrics import full_metrics

ROOT = grafana_dashboard.ROOT
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
SCRAPED = {"instance", "job"}  # labels that Prometheus adds to everything
NOT_OURS = {"up": SCRAPED, "probe_success": SCRAPED}  # Prometheus's and the blackbox exporter's
Labels = dict[str, set[str]]  # {label: its values}
# A name before a selector, a range, or alone: whatever is no function and no label.
METRIC = re.compile(r"(moe_serve:\w+|\bup\b|\bprobe_success\b)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


@pytest.fixture(scope="module")
def exposed() -> dict[str, Labels]:
    """Every sample of a server with all optional parts."""
    found: dict[str, Labels] = defaultdict(lambda: defaultdict(set))
    for family in text_string_to_metric_families(full_metrics()):
        for sample in family.samples:
            found[sample.name]  # also without labels
            for label, value in sample.labels.items():
                found[sample.name][label].add(value)
    return dict(found)


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Returns (legend, query) of every line of every panel."""
    for panel in json.loads(grafana_dashboard.FILE.read_text("utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            yield target["legendFormat"], target["expr"]


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def unknown(query: str, exposed: dict[str, Labels]) -> list[str]:
    """Returns the names, labels and label values of a query that a server does not have."""
    wrong = []
    labels: set[str] = set(SCRAPED)
    for name, matchers in METRIC.findall(query):
        if name in NOT_OURS:
            continue
        if name not in exposed:
            wrong.append(name)
            continue
        labels |= set(exposed[name])
        for label, operator, value in MATCHER.findall(matchers):
            if label in SCRAPED:
                continue
            if label not in exposed[name]:
                wrong.append(f"{name}{{{label}}}")
            elif operator in ("=", "!=") and value not in exposed[name][label]:
                wrong.append(f"{name}{{{label}={value}}}")
    for listed in re.findall(r"\bby \(([^)]*)\)", query):
        wrong += [label for label in re.split(r",\s*", listed) if label not in labels]
    return wrong


def result_labels(query: str, exposed: dict[str, Labels]) -> set[str]:
    """Returns the labels of the series that a query gives."""
    if grouped := re.search(r"\bby \(([^)]*)\)", query):
        return set(re.split(r",\s*", grouped[1]))
    names = [name for name, _ in METRIC.findall(query)]
    return SCRAPED | {label for name in names for label in exposed.get(name, ())}


def test_the_page_is_the_table() -> None:
    """A server with every part has each row of the table, in order, and no other metric."""
    families = list(text_string_to_metric_families(full_metrics()))
    assert [family.name.removeprefix(PREFIX) for family in families] == [r.name for r in METRICS]
    for family, row in zip(families, METRICS, strict=True):
        assert (family.type, family.documentation) == (row.kind, row.help), row.name
        labels = {label for sample in family.samples for label in sample.labels}
        assert labels - {MODEL_LABEL, "le"} == set(row.labels), row.name
        assert {sample.name.removeprefix(PREFIX) for sample in family.samples} == set(
            row.sample_names
        )


def test_the_documentation_has_every_metric() -> None:
    written = metrics_table.BLOCK.text()
    assert written == metrics_table.render(), "run tables.metrics_table --write"


def test_the_dashboard_is_what_the_script_writes() -> None:
    written = grafana_dashboard.FILE.read_text("utf-8")
    assert written == grafana_dashboard.render(), (
        "run: PYTHONPATH=scripts python -m tables.grafana_dashboard --write"
    )


def test_the_dashboard_asks_for_what_there_is(exposed: dict[str, Labels]) -> None:
    queries = list(dashboard_queries())
    assert len(queries) > 40
    for legend, query in queries:
        assert METRIC.search(query), f"{query} asks for no metric"
        assert unknown(query, exposed) == [], query
        shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert shown <= result_labels(query, exposed), f"{legend}: {query}"


def test_the_alerts_ask_for_what_there_is(exposed: dict[str, Labels]) -> None:
    assert len({rule["alert"] for rule in alerts()}) == len(alerts()) > 8
    for rule in alerts():
        query = rule["expr"]
        assert METRIC.search(query), f"{rule['alert']} asks for no metric"
        assert unknown(query, exposed) == [], rule["alert"]
        text = " ".join(rule["annotations"].values())
        shown = set(re.findall(r"\$labels\.(\w+)", text))
        assert shown <= result_labels(query, exposed), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_rates_are_of_counters() -> None:
    queries = [query for _, query in dashboard_queries()] + [rule["expr"] for rule in alerts()]
    names = [
        name for query in queries for name in re.findall(r"(?:rate|increase)\(([\w:]+)", query)
    ]
    assert len(names) > 20
    assert [name for name in names if not name.endswith(("_total", "_count", "_bucket"))] == []


def test_brackets_close() -> None:
    for query in [query for _, query in dashboard_queries()] + [rule["expr"] for rule in alerts()]:
        outside = re.sub(r'"[^"]*"', "", query)
        for left, right in ("()", "[]", "{}"):
            assert outside.count(left) == outside.count(right), query


def test_what_is_wrong_is_found(exposed: dict[str, Labels]) -> None:
    """The checks above can fail."""
    for query, wrong in (
        ("rate(moe_serve:engine_step_total[5m])", ["moe_serve:engine_step_total"]),
        ('moe_serve:pool_ranks{role="expert"}', ["moe_serve:pool_ranks{role}"]),
        ('moe_serve:pool_ranks{pool="experts"}', ["moe_serve:pool_ranks{pool=experts}"]),
        ("sum by (rank) (moe_serve:pool_ranks)", ["rank"]),
        ('moe_serve:pool_ranks{pool="expert",instance="a"}', []),
    ):
        assert unknown(query, exposed) == wrong, query


def test_query_text() -> None:
    chosen = 'model_name=~"$model_name",instance=~"$instance"'
    assert query_text('sum(<a>) / <b|c="d">') == (
        f'sum(moe_serve:a{{{chosen}}}) / moe_serve:b{{{chosen},c="d"}}'
    )


def test_every_panel_has_a_place_of_its_own() -> None:
    panels = grafana_dashboard.dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < grafana_dashboard.WIDTH
