"""The rows of the metrics table about cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_serve.engine.request.stats import CellStatus
from moe_serve.http.metrics.scrape import MetricRow, Samples, ScrapePart

_LABELS = ("cell", "role")
_cells = ScrapePart[Sequence[CellStatus]](lambda scrape: scrape.stats.cells or None, "cell_")


def _each(value: Callable[[CellStatus], float]) -> Callable[[Sequence[CellStatus]], Samples]:
    """Reads a value of every cell."""
    return lambda cells: {(cell.name, cell.role): value(cell) for cell in cells}


CELL_ROWS: tuple[MetricRow, ...] = (
    _cells.gauge(
        "requests_running",
        "Sequences in the batches of a cell.",
        _each(lambda cell: cell.load.num_running),
        *_LABELS,
    ),
    _cells.gauge(
        "requests_waiting",
        "Sequences in the queues of a cell.",
        _each(lambda cell: cell.load.num_waiting),
        *_LABELS,
    ),
    _cells.gauge(
        "kv_cache_usage_perc",
        "Share of a cell's KV pages that sequences hold, 0 to 1.",
        _each(lambda cell: cell.load.used_share),
        *_LABELS,
    ),
    _cells.gauge(
        "draining",
        "1 while a cell gets no new requests, else 0.",
        _each(lambda cell: float(cell.is_draining)),
        *_LABELS,
    ),
    _cells.gauge(
        "outage_seconds",
        "For how long a cell has been unable to compute; 0 while it can.",
        _each(lambda cell: cell.outage_s),
        *_LABELS,
    ),
    _cells.counter("steps", "Steps of a cell.", _each(lambda cell: cell.num_steps), *_LABELS),
)
