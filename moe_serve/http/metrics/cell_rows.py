"""The rows of the metrics table about cells, and about requests that move between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

from moe_serve.engine.request.moves_stats import MovesStats
from moe_serve.engine.request.stats import (
    CellState,
    CellStatus,
    ScaleAction,
    ScalingStats,
)
from moe_serve.http.metrics.scrape import MetricRow, Samples, ScrapePart

_SERVING = ("serving", "draining", "leaving")  # cells with series of their own
_LABELS = ("cell", "role")
_cells = ScrapePart[Sequence[CellStatus]](lambda scrape: scrape.stats.cells or None, "cell_")


def _each(value: Callable[[CellStatus], float]) -> Callable[[Sequence[CellStatus]], Samples]:
    """Reads a value of every cell."""
    return lambda cells: {
        (cell.name, cell.role): value(cell) for cell in cells if cell.state in _SERVING
    }


def _by_state(cells: Sequence[CellStatus]) -> Samples:
    """Counts the cells in each state; a state without cells counts 0."""
    return {(state,): sum(cell.state == state for cell in cells) for state in get_args(CellState)}


_CELL_ROWS: tuple[MetricRow, ...] = (
    _cells.gauge("count", "Cells by state.", _by_state, "state"),
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
        "1 while a cell gets no new requests because it drains or leaves, else 0.",
        _each(lambda cell: float(cell.is_draining)),
        *_LABELS,
    ),
    _cells.gauge(
        "outage_seconds",
        "Time since a cell has been unable to compute; 0 while it can.",
        _each(lambda cell: cell.outage_s),
        *_LABELS,
    ),
    _cells.counter("steps", "Steps of a cell.", _each(lambda cell: cell.num_steps), *_LABELS),
)

_moves = ScrapePart[MovesStats](lambda scrape: scrape.stats.moves, "cell_")
_MOVE_ROWS: tuple[MetricRow, ...] = (
    _moves.counter(
        "moves",
        "Ended moves of requests between cells, by purpose and result. A move that is done "
        "computed nothing again.",
        lambda m: {(kind, result): count for (kind, result), count in m.ended.items()},
        "kind",
        "result",
    ),
    _moves.gauge("moves_open", "Moves of requests in progress.", lambda m: m.num_leases),
    _moves.counter("moved_pages", "KV pages that arrived in another cell.", lambda m: m.num_pages),
    _moves.counter("moved_bytes", "Bytes of these pages.", lambda m: m.num_bytes),
    _moves.counter(
        "failed_parcels",
        "Parcels of KV pages that failed: a rank was lost, a checksum was wrong, or time ran out.",
        lambda m: m.num_failed_parcels,
    ),
    _moves.counter(
        "recomputed_tokens",
        "Tokens that were computed again because their pages were lost on the way.",
        lambda m: m.num_recomputed_tokens,
    ),
    _moves.histogram(
        "move_downtime_seconds",
        "Time for which a moving request was in no cell.",
        lambda m: m.downtime_s,
    ),
    _moves.histogram(
        "move_downtime_steps",
        "Steps of the new cell that a moving request missed.",
        lambda m: m.downtime_steps,
    ),
)
_scaling = ScrapePart[ScalingStats](lambda scrape: scrape.stats.scaling, "cells_")
_SCALING_ROWS: tuple[MetricRow, ...] = (
    _scaling.gauge(
        "wanted",
        "Number of cells of a role that autoscaling wants, within its limits.",
        lambda s: {(role,): count for role, count in s.wanted.items()},
        "role",
    ),
    _scaling.counter(
        "scale_decisions",
        "Decisions of autoscaling, by result: add, remove, keep, hold (another number is wanted "
        "but not possible now) or failed (a cell could not start).",
        lambda s: {(action,): s.num_decisions.get(action, 0) for action in get_args(ScaleAction)},
        "action",
    ),
)
CELL_ROWS: tuple[MetricRow, ...] = (*_CELL_ROWS, *_MOVE_ROWS, *_SCALING_ROWS)
