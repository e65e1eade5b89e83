"""Judges orders of the queue by service tiers on four recorded workloads, in the simulator.

    python benchmarks/run.py deadlines --workloads WORKLOADS
    python benchmarks/run.py deadlines --workloads WORKLOADS --trace code --load 1.2 --seeds 1
    python benchmarks/run.py deadlines --workloads WORKLOADS --choose --trace conv --trace vtc
    python benchmarks/run.py deadlines --workloads WORKLOADS --fairness
    python benchmarks/run.py deadlines --workloads WORKLOADS --budgets --trace conv
    python benchmarks/run.py deadlines --workloads WORKLOADS --floor --trace conv --seeds 1
    python benchmarks/run.py deadlines --workloads WORKLOADS --oracle

WORKLOADS has azure2023/, mooncake/ and vtc_arena_27clients/. Loads are shares of the capacity: the
highest rate at which the queue in order of arrival is stable. `--json` keeps every run; runs that
are already in the file are not repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from deadlines.bars import Bench, bars_of
from deadlines.fairness import largest_gap
from deadlines.forecast_floor import Foreseen, foresee
from deadlines.oracle import best_possible
from deadlines.policies import ATC, FIFO, POLICIES, REFUSING, Policy
from deadlines.setting import BUDGET, TARGETS, TPOT_TIMES, TRACES, Setting, make_setting
from deadlines.verdict import Verdict, judge

LOADS = (0.7, 1.0, 1.2, 1.4)
PATIENCES, MAX_WAITS = (0.5, 2.0, 8.0, 16.0), (1.0, 1.5, 3.0)


class Kept:
    """The verdicts of this and earlier runs, in a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.verdicts: list[Verdict] = []
        if path is not None and path.exists():
            rows = json.loads(path.read_text("utf-8"))
            tuples = ("by_tier", "refused", "missed")
            self.verdicts = [Verdict(**{**r, **{k: tuple(r[k]) for k in tuples}}) for r in rows]

    def has(self, setting: Setting, policy: Policy, load: float, seed: int) -> bool:
        key = (setting.name, policy.name, load, seed)
        return key in {(v.trace, v.policy, v.load, v.seed) for v in self.verdicts}

    def add(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        if self._path is not None:
            rows = [asdict(each) for each in self.verdicts]
            self._path.write_text(json.dumps(rows, separators=(",", ":")), "utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options of a run."""

    workloads: Path
    traces: Sequence[str]
    seeds: int
    rows: float  # times the default number of rows

    def settings(self) -> Iterator[tuple[Setting, int]]:
        for name in self.traces:
            spec = TRACES[name]
            whole = spec.whole(self.workloads)
            for seed in range(self.seeds):
                yield make_setting(name, whole, spec, seed, int(spec.rows * self.rows)), seed


def sweep(plan: Plan, policies: Sequence[Policy], loads: Sequence[float], kept: Kept) -> None:
    """Judges all policies at all loads."""
    for setting, seed in plan.settings():
        print(
            f"{setting.name}, seed {seed}: capacity {setting.capacity:.2f} requests/s, top target "
            f"{1e3 * setting.target_s:.0f} ms, TPOT alone {1e3 * setting.unloaded_tpot_s:.1f} ms",
            flush=True,
        )
        for load in loads:
            for policy in policies:
                if not kept.has(setting, policy, load, seed):
                    verdict, _ = judge(setting, policy, load, seed)
                    kept.add(verdict)


def choose(plan: Plan, kept: Kept) -> None:
    """Judges ATC with several constants, with which it is then judged on other traces."""
    policies = [
        replace(ATC, name=f"atc K{patience:g} W{wait:g}", patience=patience, max_wait=wait)
        for patience in PATIENCES
        for wait in MAX_WAITS
    ]
    sweep(plan, [FIFO, *policies], (1.2, 1.4), kept)


def fairness(plan: Plan, load: float) -> Table:
    """Compares the largest gap between backlogged tenants, over more and more of the run."""
    table = Table("policy", "25%", "50%", "75%", "100% of the arrivals", "tokens/s", "Jain")
    setting, seed = next(iter(plan.settings()))
    for policy in (FIFO, ATC):
        verdict, report = judge(setting, policy, load, seed)
        last = max(record.scheduled_s for record in report.records)
        gaps = [largest_gap(report.records, share * last) for share in (0.25, 0.5, 0.75, 1.0)]
        even = "-" if report.service is None else f"{report.service.jain or 1:.2f}"
        table.add_row(
            policy.name, *(f"{gap:,.0f}" for gap in gaps), f"{verdict.tokens_per_s:,.0f}", even
        )
    return table


def budgets(plan: Plan, load: float) -> Table:
    """Compares fixed numbers of tokens in a step with as many as the slack allows. The top tier has
    a target for the time between tokens."""
    table = Table("trace", "budget", "gaps within", "P99 gap/target", "prompt tokens/s", "met")
    for setting, seed in plan.settings():
        slack = replace(ATC, name="slack", has_tpot=True, step_budget="slack", budget=4 * BUDGET)
        fixed = [
            replace(ATC, name=str(tokens), has_tpot=True, budget=tokens)
            for tokens in (64, 128, 256, 512, 1024)
        ]
        target_s = TPOT_TIMES * setting.unloaded_tpot_s
        for policy in (slack, *fixed):
            verdict, report = judge(setting, policy, load, seed)
            top = [r for r in report.records if r.tier == "interactive" and r.is_ok]
            gaps = np.concatenate([np.asarray(r.gaps_s, dtype=np.float64) for r in top])
            table.add_row(
                setting.name,
                policy.name,
                f"{(gaps <= target_s).mean():.2%}",
                f"{np.percentile(gaps, 99) / target_s:.2f}",
                f"{report.summary.input_tok_s:,.0f}",
                f"{verdict.attained:.1%}",
            )
    return table


def floors(plan: Plan, load: float) -> Table:
    """Compares the server's forecasts with the best that are possible, at every 30th arrival."""
    table = Table("trace", "tier", "arrivals", "error", "least error", "refused", "would miss")
    for setting, _ in plan.settings():
        found = foresee(setting, REFUSING, load, every=30, num_copies=5)
        for tier in TARGETS:
            of_tier = [each for each in found if each.tier == tier]
            answered = [each for each in of_tier if each.actual_s and each.predicted_s]
            refused = [each for each in of_tier if each.is_refused]
            table.add_row(
                setting.name, tier, str(len(of_tier)),
                _median_error(answered, lambda each: each.predicted_s or 0.0),
                _median_error(answered, lambda each: float(np.median(each.copies))),
                str(len(refused)), str(sum(each.miss_share >= 0.5 for each in refused)),
            )  # fmt: skip
    return table


def oracles(plan: Plan, load: float) -> Table:
    """Prints the largest possible share of the top tier in time."""
    table = Table("trace", "seed", "top tier alone", "no schedule above")
    for setting, seed in plan.settings():
        found = best_possible(setting, load)
        table.add_row(setting.name, str(seed), f"{found.alone:.1%}", f"{found.bound:.1%}")
    return table


def _median_error(found: Sequence[Foreseen], predicted: Callable[[Foreseen], float]) -> str:
    errors = [abs(predicted(each) / each.actual_s - 1) for each in found if each.actual_s]
    return f"{np.median(errors):.1%}" if errors else "-"


def figures(verdicts: Sequence[Verdict]) -> Table:
    """Returns the means over seeds of every trace, load and policy."""
    names = (
        "trace", "load", "policy", "met", "by tier", "top P99/target", "w. tardiness, s",
        "longest/bound", "tokens/s", "refused", "kept", "failed",
    )  # fmt: skip
    table = Table(*names)
    groups: dict[tuple[str, float, str], list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault((verdict.trace, verdict.load, verdict.policy), []).append(verdict)
    for (trace, load, policy), found in groups.items():
        mean = {
            "met": np.mean([v.attained for v in found]),
            "tardiness": np.mean([v.tardiness for v in found]),
            "top": np.mean([v.p99_over_target for v in found]),
            "wait": np.mean([v.longest_wait / v.max_wait for v in found]),
            "tokens": np.mean([v.tokens_per_s for v in found]),
        }
        tiers = np.mean([v.by_tier for v in found], axis=0)
        promised, kept = sum(v.promised for v in found), sum(v.kept for v in found)
        table.add_row(
            trace, f"{load:g}", policy, f"{mean['met']:.1%}",
            " / ".join(f"{100 * share:.0f}" for share in tiers),
            f"{mean['top']:.2f}", f"{mean['tardiness']:.3f}", f"{mean['wait']:.2f}",
            f"{mean['tokens']:,.0f}", f"{np.mean([len(v.refused) for v in found]):.0f}",
            f"{kept / promised:.1%}" if promised and "refuse" in policy else "-",
            str(sum(v.num_failed for v in found)),
        )  # fmt: skip
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=Path, required=True)
    parser.add_argument("--trace", action="append", choices=list(TRACES))
    parser.add_argument("--load", action="append", type=float)
    parser.add_argument("--policy", action="append", choices=[p.name for p in POLICIES])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=float, default=1.0, help="times the default number of rows")
    parser.add_argument("--choose", action="store_true", help="sweep the constants of atc")
    parser.add_argument("--fairness", action="store_true", help="gaps between tenants on vtc")
    parser.add_argument("--budgets", action="store_true", help="fixed and slack step budgets")
    parser.add_argument("--floor", action="store_true", help="the best possible forecasts")
    parser.add_argument("--oracle", action="store_true", help="the best possible top tier")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    kept, console = Kept(arguments.json), Console(width=160)
    plan = Plan(
        workloads=arguments.workloads,
        traces=arguments.trace or list(TRACES),
        seeds=arguments.seeds,
        rows=arguments.rows,
    )
    if arguments.fairness:
        console.print(fairness(replace(plan, traces=("vtc",)), 1.3))
        return 0
    if arguments.oracle:
        console.print(oracles(plan, 1.2))
        return 0
    if arguments.floor:
        console.print(floors(plan, 1.2))
        return 0
    if arguments.budgets:
        console.print(budgets(replace(plan, seeds=1), 1.2))
        return 0
    if arguments.choose:
        choose(plan, kept)
    else:
        wanted = arguments.policy or [policy.name for policy in POLICIES]
        policies = [policy for policy in POLICIES if policy.name in wanted]
        sweep(plan, policies, arguments.load or LOADS, kept)
    console.print(figures(kept.verdicts))
    bars = Table("trace", "bar", "found", "seeds", "asked", "")
    for bar in bars_of(Bench(kept.verdicts), "atc", "atc+refuse"):
        bars.add_row(*bar.row())
    console.print(bars)
    print(f"{sum(v.cpu_s for v in kept.verdicts):.0f} CPU seconds of {len(kept.verdicts)} runs")
    return 0
