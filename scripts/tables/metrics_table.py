"""Renders the table of metrics in docs/operate/observability.md from the server's own table.

    PYTHONPATH=scripts python -m tables.metrics_table            print it
    PYTHONPATH=scripts python -m tables.metrics_table --write    put it into the page

tests/deploy/test_deploy_metrics.py compares the page, the dashboard and the alerts with a server
that has all features.
"""

from __future__ import annotations

from pathlib import Path

from moe_serve.http.metrics.scrape import MetricRow
from moe_serve.http.metrics.table import METRICS
from tables.page_block import PageBlock

BLOCK = PageBlock(
    Path(__file__).resolve().parents[2] / "docs" / "operate" / "observability.md",
    "<!-- metrics: begin -->",
    "<!-- metrics: end -->",
)
HEADER = "| metric | kind | labels | |\n|---|---|---|---|"


def render() -> str:
    """Returns one row for each metric, in the order of the page."""
    return "\n".join([HEADER, *map(_line, METRICS)]) + "\n"


def _line(row: MetricRow) -> str:
    shown = f"{row.name}_total" if row.kind == "counter" else row.name
    kind = row.kind + (", also vLLM's" if row.is_vllm else "")
    labels = ", ".join(f"`{label}`" for label in sorted(row.labels))
    text = row.help.replace("|", "\\|")
    return f"| `{shown}` | {kind} | {labels} | {text} |"


if __name__ == "__main__":
    BLOCK.main(render, "The table of docs/operate/observability.md.")
