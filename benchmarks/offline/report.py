"""All results of a run: one JSON file to which a later run can add peers, and the tables of
`engine`, with a row per engine, and the targets.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.machine import MachineLimits, Roofline, roofline
from harness.model_size import ModelSize
from harness.work import Work

from .duel import OWN
from .result import LESS_IS_BETTER, Bar, Comparison, Figures, Result, bars_of, figures_of

_SAME = ("model_name", "model", "num_threads", "work")  # what merged reports have in common


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """The machine's limits just before the duel, and one result per engine."""

    machine: MachineLimits
    results: tuple[Result, ...]

    @property
    def own(self) -> Result | None:
        return next((r for r in self.results if r.engine == OWN), None)

    @property
    def peer(self) -> Result | None:
        return next((r for r in self.results if r.engine != OWN), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of one run, or of several runs of the same work on the same model and threads."""

    model_name: str
    model: ModelSize
    num_threads: int
    work: Work
    environment: dict[str, str]
    duels: tuple[Duel, ...] = ()

    def with_duel(self, duel: Duel) -> Report:
        """Returns the report with this duel, which replaces an earlier one with the same peer."""
        kept = [earlier for earlier in self.duels if _peer_name(earlier) != _peer_name(duel)]
        return replace(self, duels=(*kept, duel))

    def merged(self, path: Path) -> Report:
        """Returns the report with the duels of an earlier one first; exits if that had other
        work.
        """
        earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        mine = asdict(self)
        for key in _SAME:
            if earlier[key] != mine[key]:
                raise SystemExit(f"{path} was measured with another {key}: {earlier[key]}.")
        return replace(self, duels=(*map(_read_duel, earlier["duels"]), *self.duels))

    def machine(self) -> MachineLimits:
        """Returns the median of each rate over the duels."""
        names = [field.name for field in fields(MachineLimits) if field.name != "num_threads"]
        rates = {n: statistics.median(getattr(d.machine, n) for d in self.duels) for n in names}
        return MachineLimits(num_threads=self.num_threads, **rates)

    def limits(self) -> Roofline:
        return roofline(self.machine(), self.model, self.work)

    def own(self) -> Figures | None:
        """Returns moe-serve's figures over all its duels."""
        return figures_of([duel.own for duel in self.duels if duel.own], self.work)

    def comparisons(self) -> list[Comparison]:
        """Compares the engines over the duels that both finished."""
        found = []
        for duel in self.duels:
            if duel.own and duel.peer:
                own, theirs = (figures_of([r], self.work) for r in (duel.own, duel.peer))
                if own and theirs:
                    found.append(Comparison(peer=duel.peer.engine, own=own, theirs=theirs))
        return found

    def bars(self) -> list[Bar]:
        caches = [d.own.cache_bytes for d in self.duels if d.own and d.own.cache_bytes]
        cache_bytes = max(caches, default=0)
        return bars_of(self.own(), self.comparisons(), self.model.num_bytes, cache_bytes)

    def write(self, path: Path) -> None:
        """Writes the file with derived figures, which a merge computes again."""
        own = self.own()
        follows = {
            "limits": asdict(self.limits()),
            "moe_serve": asdict(own) if own else None,
            "comparisons": [asdict(comparison) for comparison in self.comparisons()],
            "bars": [asdict(bar) for bar in self.bars()],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self) | follows, indent=1) + "\n", encoding="utf-8")


def _peer_name(duel: Duel) -> str | None:
    return duel.peer.engine if duel.peer else None


def _read_duel(entry: dict[str, Any]) -> Duel:
    return Duel(
        machine=MachineLimits(**entry["machine"]),
        results=tuple(Result(**result) for result in entry["results"]),
    )


_WIDTH = 132  # columns; more if the terminal has more
# (figure, heading, scale, decimals)
_COLUMNS = (
    ("ttft_s", "TTFT\nalone, ms", 1e3, 0),
    ("single_decode_tok_s", "one stream\ndecode tok/s", 1.0, 1),
    ("batch_total_tok_s", "many, with\nprompts tok/s", 1.0, 1),
    ("batch_decode_tok_s", "many, decode\nalone tok/s", 1.0, 1),
    ("prefill_tok_s", "prefill\ntok/s", 1.0, 0),
    ("load_s", "load\ns", 1.0, 1),
    ("peak_gib", "peak\nGiB", 1.0, 2),
    ("rest_gib", "after\nGiB", 1.0, 2),
)


def print_tables(report: Report) -> None:
    """Prints the limits, moe-serve, every peer with its ratios, then the targets and the
    failures.
    """
    console = Console(width=max(_WIDTH, Console().width))
    machine, size = report.machine(), report.model
    console.print(
        f"{report.model_name}: {size.num_parameters / 1e6:,.1f} M parameters, {size.dtype}; "
        f"{report.num_threads} threads: reads {machine.read_gb_s:.1f} GB/s, "
        f"GEMM {machine.gemm_bf16_gflop_s:,.0f} GFLOP/s bf16, "
        f"{machine.gemm_fp32_gflop_s:,.0f} GFLOP/s fp32; others used {machine.busy_cores:.1f} cores"
    )
    console.print(_speeds(report))
    console.print("a ratio above 1 means that moe-serve is better")
    if report.comparisons():
        console.print(_bars(report))
    for duel in report.duels:
        for result in duel.results:
            if result.error:
                console.print(f"{result.engine} failed: {result.error}", markup=False)
        if duel.own and duel.peer and duel.own.answers and duel.peer.answers:
            console.print(f"{duel.peer.engine}: {_agreement(duel.own, duel.peer)}", markup=False)


def _speeds(report: Report) -> Table:
    table = Table()
    table.add_column(no_wrap=True)
    for _, heading, _, _ in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    limits, own = report.limits(), report.own()
    table.add_row("limit of the machine", *_limit_cells(limits))
    set_by = (limits.limited_by.get(key, "") for key, *_ in _COLUMNS)
    table.add_row("  set by", *set_by, end_section=True)
    if own:
        table.add_row("moe-serve", *_cells(own))
        table.add_row("  of the limit", *_fractions(limits, own), end_section=True)
    compared = {comparison.peer: comparison for comparison in report.comparisons()}
    for duel in report.duels:
        figures = figures_of([duel.peer], report.work) if duel.peer else None
        if duel.peer is None or figures is None:
            continue
        table.add_row(duel.peer.engine, *_cells(figures))
        if comparison := compared.get(duel.peer.engine):
            ratios = (comparison.ratio(key) for key, *_ in _COLUMNS)
            cells = ("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)
            table.add_row("  ratio", *cells, style="bold")
    return table


def _bars(report: Report) -> Table:
    table = Table("bar", "wanted", "measured", "verdict")
    verdicts = {True: "met", False: "missed", None: "not measured"}
    for bar in report.bars():
        table.add_row(bar.what, bar.wanted, bar.measured, verdicts[bar.is_met])
    return table


def _cells(figures: Figures) -> list[str]:
    return [
        f"{getattr(figures, key) * scale:,.{decimals}f}" for key, _, scale, decimals in _COLUMNS
    ]


def _limit_cells(limits: Roofline) -> list[str]:
    return [
        f"{getattr(limits, key) * scale:,.{decimals}f}"
        for key, _, scale, decimals in _COLUMNS
        if key in limits.limited_by
    ]


def _fractions(limits: Roofline, own: Figures) -> list[str]:
    cells = []
    for key in limits.limited_by:
        limit, mine = float(getattr(limits, key)), float(getattr(own, key))
        fraction = (limit / mine if key in LESS_IS_BETTER else mine / limit) if mine else 0.0
        cells.append(f"{100 * fraction:.0f}%")
    return cells


def _agreement(own: Result, peer: Result) -> str:
    """Compares the answers of a batch, to check that both did the same work: first tokens, and
    all tokens.
    """
    pairs = list(zip(own.answers, peer.answers, strict=True))
    same_first = sum(a[0] == b[0] for a, b in pairs)
    same_all = sum(a == b for a, b in pairs)
    return f"same first token {same_first} of {len(pairs)}, whole answer {same_all} of {len(pairs)}"
