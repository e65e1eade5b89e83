"""The report of one run, and the JSON file that holds it."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from moe_serve.bench.client.load_client import ClientHealth
from moe_serve.bench.client.server_metrics import ServerSide
from moe_serve.bench.figures.cells_figures import CellsFigures
from moe_serve.bench.figures.request_record import RequestRecord, RunTimeline
from moe_serve.bench.figures.summary import Goodput, Spread, Summary
from moe_serve.bench.figures.tier_figures import ServiceFigures
from moe_serve.errors import BenchError
from moe_serve.regular_file import regular_file

SCHEMA = "moe-serve-bench"
VERSION = 1
_RATES = ("requests_per_s", "input_tok_s", "output_tok_s", "error_rate", "cached_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All values that tables, pictures and comparisons show.

    `quantiles_ms` are the distributions of ttft, tpot, itl and e2e at 0, 0.5, ... 100%. `records`
    are in the file only if requested, and only with them can a comparison give intervals.
    """

    url: str
    model: str
    created: str  # ISO 8601, UTC
    moe_serve_version: str
    workload: dict[str, Any]  # seed and settings of the workload, as JSON types
    client: dict[str, str]  # the machine that sent the load
    summary: Summary
    health: ClientHealth
    timeline: RunTimeline
    quantiles_ms: dict[str, list[float]]
    server: ServerSide | None = None
    notes: list[str] = field(default_factory=list)
    is_interrupted: bool = False
    service: ServiceFigures | None = None  # by tier and tenant; None: the run had no tiers
    cells: CellsFigures | None = None  # of a simulation of several cells
    records: tuple[RequestRecord, ...] = ()

    @property
    def is_open(self) -> bool:
        return bool(self.workload.get("is_open"))

    def write(self, path: Path, *, has_records: bool) -> None:
        """Writes the file. NaN is never written: unknown values are null."""
        content: dict[str, Any] = {"schema": SCHEMA, "version": VERSION}
        content |= asdict(self)
        content["summary"] |= {name: getattr(self.summary, name) for name in _RATES}
        del content["records"]
        if has_records:
            content["requests"] = [_record_json(record) for record in self.records]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                json.dump(content, file, indent=1, allow_nan=False)
                file.write("\n")
        except OSError as error:
            raise BenchError(
                f"cannot write {path}: {getattr(error, 'strerror', None) or error}."
            ) from None


def read_report(path: Path) -> Report:
    try:
        content = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}."
        ) from None
    except ValueError:
        raise BenchError(f"{path} is not JSON: it must be a report of `bench --json`.") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise BenchError(f"{path} is not a report of `moe-serve bench`: it has no schema {SCHEMA}.")
    if content.get("version") != VERSION:
        raise BenchError(
            f"{path} has version {content.get('version')} of its schema; "
            f"this command reads {VERSION}."
        )
    try:
        return _report(content)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BenchError(
            f"{path} is damaged: {type(error).__name__}: {str(error)[:100]}."
        ) from None


def _report(content: Mapping[str, Any]) -> Report:
    added = ("records", "service", "cells")  # the first version had no tiers and no cells
    values = {f.name: content[f.name] for f in fields(Report) if f.name not in added}
    health, timeline = dict(values["health"]), dict(values["timeline"])
    for name in ("loop_lag", "lateness"):
        health[name] = _spread(health[name])
    for name, series in timeline.items():
        timeline[name] = tuple(series) if isinstance(series, list) else series
    values |= {
        "summary": _summary(values["summary"]),
        "health": ClientHealth(**health),
        "timeline": RunTimeline(**timeline),
        "server": None if values["server"] is None else ServerSide(**values["server"]),
        "service": _service(content.get("service")),
        "cells": _cells(content.get("cells")),
        "records": tuple(_record(row) for row in content.get("requests", ())),
    }
    return Report(**values)


def _summary(content: Mapping[str, Any]) -> Summary:
    values = {key: value for key, value in content.items() if key not in _RATES}
    for name in values:
        if name.endswith("_ms"):
            values[name] = _spread(values[name])
    if values["goodput"] is not None:
        values["goodput"] = Goodput(**values["goodput"])
    return Summary(**values)


def _service(content: Mapping[str, Any] | None) -> ServiceFigures | None:
    return None if content is None else ServiceFigures.from_json(content)


def _cells(content: Mapping[str, Any] | None) -> CellsFigures | None:
    return None if content is None else CellsFigures.from_json(content)


def _spread(content: Mapping[str, Any] | None) -> Spread | None:
    return None if content is None else Spread(**content)


def _record_json(record: RequestRecord) -> dict[str, Any]:
    """Returns a record without fields that have their default; times are rounded to the
    microsecond."""
    row: dict[str, Any] = {}
    for item in fields(RequestRecord):
        value = getattr(record, item.name)
        if isinstance(value, array):
            value = [round(number, 6) if isinstance(number, float) else number for number in value]
        elif isinstance(value, float):
            value = round(value, 6)
        if value not in (None, "", []):
            row[item.name] = value
    return row


def _record(row: Mapping[str, Any]) -> RequestRecord:
    values = dict(row)
    values["gaps_s"] = array("d", row.get("gaps_s", ()))
    values["gap_tokens"] = array("L", row.get("gap_tokens", ()))
    return RequestRecord(**values)
