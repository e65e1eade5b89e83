"""All results of a run, as one JSON file to which a later run can add peers."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from harness.machine import MachineLimits
from harness.model_size import ModelSize
from harness.roofline import Roofline, roofline
from harness.work import Work

from .comparison import Bar, Comparison, bars_of
from .peers import OWN
from .result import Figures, Result, figures_of

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
