"""The figures of an entrant from its times (rates, and their share of the device's limits), the
file of results, to which runs add, and its table with the targets.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gpu_bench.job import BASE, Outcome
from harness.machine import MachineLimits, roofline
from harness.model_size import ModelSize
from harness.work import Work

RATES = ("single_decode_tok_s", "batch_decode_tok_s", "batch_total_tok_s", "prefill_tok_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures from medians; None if not measured.

    The time of decoding alone is that of a long answer minus that of a one-token answer.
    """

    ttft_s: float | None
    batch_first_s: float | None  # until every prompt of the batch has its first token
    single_decode_tok_s: float | None
    batch_decode_tok_s: float | None
    batch_total_tok_s: float | None
    prefill_tok_s: float | None


def figures_of(outcome: Outcome, work: Work) -> Figures:
    def seconds(kind: str) -> float | None:
        samples = outcome.samples_s.get(kind)
        return statistics.median(samples) if samples else None

    first, batch_first = seconds("ttft"), seconds("batch_first")
    single, batch = seconds("single"), seconds("batch")
    return Figures(
        ttft_s=first,
        batch_first_s=batch_first,
        single_decode_tok_s=_rate(work.single_output - 1, single, first),
        batch_decode_tok_s=_rate(work.batch_size * (work.batch_output - 1), batch, batch_first),
        batch_total_tok_s=_rate(work.batch_size * work.batch_output, batch, 0.0),
        prefill_tok_s=_rate(work.prefill_prompt, seconds("prefill"), 0.0),
    )


def limits_of(machine: MachineLimits, size: ModelSize, work: Work) -> dict[str, float]:
    """Returns the best possible tokens per second: activated weights and KV over the bandwidth."""
    best = roofline(machine, size, work)
    return {name: float(getattr(best, name)) for name in RATES}


def _rate(num_tokens: int, seconds: float | None, less: float | None) -> float | None:
    """Returns the rate, or None if the noise of the clock is larger than the work."""
    if seconds is None or less is None or seconds <= less:
        return None
    return num_tokens / (seconds - less)


_LEAST_SHARE, _LEAST_RATIO = 0.55, 3.0
_TARGETS = (("one stream", "single_decode_tok_s"), ("many streams", "batch_decode_tok_s"))
_COLUMNS = (
    ("ttft_s", "TTFT, one\nms", 1e3),
    ("batch_first_s", "TTFT, all\nms", 1e3),
    ("single_decode_tok_s", "one stream\ntok/s", 1.0),
    ("batch_decode_tok_s", "many, decode\ntok/s", 1.0),
    ("batch_total_tok_s", "many, all\ntok/s", 1.0),
    ("prefill_tok_s", "prefill\ntok/s", 1.0),
)


@dataclass(slots=True, kw_only=True)
class ModelReport:
    """The entrants of one model; `limits` has the best possible rates by entrant."""

    model: str
    dtype: str
    work: Work
    device: str
    environment: dict[str, str]
    machine: dict[str, float]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    limits: dict[str, dict[str, float]] = field(default_factory=dict)

    def merge(self, path: Path) -> None:
        """Takes over earlier entrants if they had the same work in the same dtype."""
        earlier = _read(path).get("models", {}).get(self.model)
        if earlier is None or (earlier["work"], earlier["dtype"]) != (
            asdict(self.work),
            self.dtype,
        ):
            return
        for name, entry in earlier["entrants"].items():
            self.outcomes[name] = Outcome(**entry["outcome"])
            self.limits[name] = entry["limits"]

    def write(self, path: Path) -> None:
        """Writes the report of one model into the file; other models in the file stay."""
        content = _read(path)
        mine = {
            "dtype": self.dtype,
            "work": asdict(self.work),
            "environment": self.environment,
            "machine": self.machine,
            "entrants": {
                name: {
                    "figures": asdict(figures_of(outcome, self.work)),
                    "limits": self.limits[name],
                    "outcome": asdict(outcome),
                }
                for name, outcome in self.outcomes.items()
            },
            "verdicts": self.verdicts(),
        }
        content = {"device": self.device, "models": content.get("models", {}) | {self.model: mine}}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")

    def verdicts(self) -> dict[str, str]:
        """Returns each target with its result: met, missed, or not measured."""
        own = self._figures(BASE)
        peers = [self._figures(name) for name in self.outcomes if name.startswith("transformers")]
        found = {}
        for title, key in _TARGETS:
            mine = _value(own, key)
            limit = self.limits.get(BASE, {}).get(key)
            share = mine / limit if mine and limit else None
            found[f"{title}: at least {_LEAST_SHARE:.0%} of the limit"] = _verdict(
                share, _LEAST_SHARE, "of the limit"
            )
            best = max((_value(peer, key) or 0.0 for peer in peers), default=0.0)
            ratio = mine / best if mine and best else None
            found[f"{title}: at least {_LEAST_RATIO:.0f}x the best transformers"] = _verdict(
                ratio, _LEAST_RATIO, "x of it"
            )
        return found

    def show(self) -> None:
        console = Console(width=max(140, Console().width))
        machine = ", ".join(f"{key} {value:,.0f}" for key, value in self.machine.items())
        console.print(f"{self.model}, random weights, {self.dtype}, {self.device}: {machine}")
        console.print(self._table())
        for name, outcome in self.outcomes.items():
            for text in filter(None, (outcome.error, *_said(outcome.failures))):
                console.print(f"{name}: {text}", markup=False)
            if agreement := self._agreement(name):
                console.print(f"{name}: {agreement}", markup=False)
        for target, verdict in self.verdicts().items():
            console.print(f"{target}: {verdict}", markup=False)

    def _table(self) -> Table:
        table = Table()
        table.add_column(no_wrap=True)
        for heading in (*(heading for _, heading, _ in _COLUMNS), "load\ns", "peak\nGiB"):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, outcome in self.outcomes.items():
            figures, limits = figures_of(outcome, self.work), self.limits[name]
            cells = [_cell(_value(figures, key), scale) for key, _, scale in _COLUMNS]
            table.add_row(
                name, *cells, f"{outcome.load_s:.0f}", f"{outcome.peak_bytes / 2**30:.1f}"
            )
            shares = [
                _share(_value(figures, key), limits[key]) if key in RATES else ""
                for key, *_ in _COLUMNS
            ]
            table.add_row("  of the limit", *shares, end_section=True)
        return table

    def _figures(self, name: str) -> Figures | None:
        outcome = self.outcomes.get(name)
        return figures_of(outcome, self.work) if outcome else None

    def _agreement(self, name: str) -> str:
        """Counts the leading tokens that equal those of moe-serve in floats."""
        base = self.outcomes.get(BASE)
        mine = self.outcomes[name]
        has_same = mine.facts.get("weights") == "the same as ours" or name.endswith("no graphs")
        if base is None or not base.answers or not mine.answers or not has_same:
            return ""
        pairs = list(zip(base.answers[0], mine.answers[0], strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        return f"the first {same} of {len(pairs)} tokens are those of {BASE}"


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _said(failures: Mapping[str, str]) -> list[str]:
    return [f"{kind}: {text}" for kind, text in failures.items()]


def _value(figures: Figures | None, key: str) -> float | None:
    value: float | None = getattr(figures, key) if figures else None
    return value


def _cell(value: float | None, scale: float) -> str:
    return "-" if value is None else f"{value * scale:,.1f}"


def _share(value: float | None, limit: float) -> str:
    return "" if value is None else f"{value / limit:.0%}"


def _verdict(value: float | None, least: float, unit: str) -> str:
    if value is None:
        return "not measured"
    return f"{'met' if value >= least else 'missed'} ({value:.2f} {unit})"
