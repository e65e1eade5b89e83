"""Compares policies of autoscaling on a simulated day, with the aims for them.

    python benchmarks/run.py autoscaling --trace AzureLLMInferenceTrace_code.csv.xz
    python benchmarks/run.py autoscaling --hours 24 --trace TRACE --policies target planned oracle
    python benchmarks/run.py autoscaling --hours 24 --trace TRACE --recorded --keep RUNS

The load is generated: Poisson arrivals whose rate rises and falls once as a cosine, from 0.3 to 1.7
times its mean. The lengths are a trace's (halved, at most 2 048 and 200 tokens) or random. With
`--recorded` the requests of the trace arrive at their own times, stretched to `--hours`.

A simulated day of large devices has millions of requests, so the cells are small: two devices with
two cores each. The wave lasts 4 hours by default, in which the load changes six times as fast as in
a day. A day takes about two minutes of a core for each policy and seed.

With `--keep RUNS` the report of each simulation stays in that folder, and one that is there with
the same options is not run again: so an ended benchmark goes on where it was. Give another version
of the program another folder.

`target` finds its share of the seats by simulation. It is also shown with 0.7, as a cell of this
kind is too slow for the limits of latency long before its seats are taken.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moe_serve.bench.report.report import Report, read_report
from moe_serve.bench.workload.trace_rows import read_trace

POLICIES = ("static", "target", "target 0.7", "planned", "oracle", "learnt")
_MODEL = ("--model", "qwen3-30b", "--precision", "fp8", "--device", "xeon")
_CELLS = ("--cells", "4x(2D tp2)", "--max-num-seqs", "16", "--max-batched-tokens", "128")
_SLO = ("--page-size", "128", "--slo", "ttft=60s,tpot=3s")
_TRACE = ("--scale-prompt", "0.5", "--max-prompt", "2048", "--max-output", "200")
_RANDOM = ("--prompt-tokens", "64:1900", "--output-tokens", "4:48")
_ATTAINMENT, _OF_STATIC, _OF_ORACLE, _CHANGES = 0.95, 0.75, 1.2, 4


def arguments(policy: str, seed: int, options: argparse.Namespace, folder: Path) -> list[str]:
    """Returns the command that simulates a policy. It writes a report whose name stands for all its
    options."""
    name, _, target = policy.partition(" ")
    lengths = ("--trace", options.trace, *_TRACE) if options.trace else _RANDOM
    scale = ["--autoscale", name, "--train-days", str(options.train_days)]
    if target:
        scale += ["--target-load", target]
    options_given = [*_MODEL, *_CELLS, *_SLO, *lengths, *arrivals(options), *scale]
    options_given += ["--seed", str(seed)]
    digest = hashlib.sha256("\0".join(options_given).encode()).hexdigest()[:12]
    out = folder / f"{name}-{digest}.json"
    return [sys.executable, "-m", "moe_serve", "simulate", *options_given, "--json", str(out)]


def arrivals(options: argparse.Namespace) -> list[str]:
    """Returns the options about when requests arrive."""
    seconds = 3600 * options.hours
    if options.recorded:
        rows = read_trace(Path(options.trace)).rows
        return ["--scale-time", str(seconds / (rows[-1].at_s - rows[0].at_s))]
    wave = ["--rate", str(options.rate), "--swing", "0.7", "--period", str(seconds)]
    return [*wave, "--duration", str(seconds)]


def simulated(options: argparse.Namespace, seed: int, folder: Path) -> dict[str, Report]:
    """Runs all policies whose reports are not in the folder, `--jobs` at a time."""
    commands = {p: arguments(p, seed, options, folder) for p in options.policies}
    paths = {policy: Path(command[-1]) for policy, command in commands.items()}
    waiting = [policy for policy, path in paths.items() if not path.exists()]
    while waiting:
        batch, waiting = waiting[: options.jobs], waiting[options.jobs :]
        running = [subprocess.Popen(commands[p], stdout=subprocess.DEVNULL) for p in batch]
        failed = [p for p, each in zip(batch, running, strict=True) if each.wait()]
        if failed:
            raise SystemExit(f"the simulation of {failed[0]} failed")
    return {policy: read_report(path) for policy, path in paths.items()}


def show(reports: dict[str, Report]) -> None:
    """Prints the figures, and whether `planned` reaches the aims."""
    hours: dict[str, float] = {}
    print(
        f"{'policy':12}{'hours':>8}{'of static':>11}{'within':>9}{'changes':>9}{'in an hour':>12}"
    )
    for policy, report in reports.items():
        scale, good = _figures(report)
        hours[policy] = scale.device_hours
        share = scale.device_hours / scale.all_device_hours
        print(
            f"{policy:12}{scale.device_hours:>8.1f}{share:>11.0%}{good:>9.1%}"
            f"{scale.num_changes:>9}{scale.most_changes_per_hour:>12}"
        )
    if {"planned", "oracle"} <= set(reports):
        scale, good = _figures(reports["planned"])
        of_static = hours["planned"] / scale.all_device_hours
        of_oracle = hours["planned"] / hours["oracle"]
        _aim("attainment", good, good >= _ATTAINMENT, f"at least {_ATTAINMENT}")
        _aim("hours of the static peak", of_static, of_static <= _OF_STATIC, f"<= {_OF_STATIC}")
        _aim("hours of the oracle", of_oracle, of_oracle <= _OF_ORACLE, f"<= {_OF_ORACLE}")
        most = scale.most_changes_per_hour
        _aim("changes in an hour", most, most <= _CHANGES, f"<= {_CHANGES}")


def _figures(report: Report):  # type: ignore[no-untyped-def]
    assert report.cells is not None and report.cells.scale is not None, "cells were scaled"
    assert report.summary.goodput is not None, "there were limits"
    return report.cells.scale, report.summary.goodput.share


def _aim(name: str, value: float, is_met: bool, aim: str) -> None:
    print(f"planned: {name} {value:.2f} (aim {aim}): {'met' if is_met else 'MISSED'}")


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", help="a trace for the lengths; default: random lengths")
    parser.add_argument("--recorded", action="store_true", help="with the times of the trace")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES[:5]))
    parser.add_argument("--rate", type=float, default=0.15, help="mean requests per second")
    parser.add_argument("--hours", type=float, default=4.0, help="of one wave")
    parser.add_argument("--train-days", type=int, default=4, help="from which learnt learns")
    parser.add_argument("--jobs", type=int, default=2, help="simulations at once")
    parser.add_argument("--keep", type=Path, help="folder for reports, to go on later")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args(given)
    if options.recorded and not options.trace:
        parser.error("--recorded takes --trace FILE")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for seed in options.seeds:
            print(f"seed {seed}")
            show(simulated(options, seed, folder))
    return 0
