"""Writes the arrivals of a recorded day as a trace, from the published rates of ServeGen's clients.

    git clone https://github.com/alibaba/ServeGen
    python benchmarks/run.py servegen_day ServeGen/data/language/m-small --lengths TRACE --out DAY

For each client ServeGen (arXiv 2505.09999, Apache-2.0) has a row for every ten minutes: the rate of
its requests, and the family of distributions that fits the gaps between them. Here a client sends
requests at its rate, scaled so that the day has `--rate` in the mean, with gaps of its family,
shape and variation. The lengths are those of requests of another trace, drawn at random.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_serve.bench.workload.trace_rows import read_trace

_DAY_S, _WINDOW_S = 86_400.0, 600.0


@dataclass(frozen=True, slots=True)
class ClientRate:
    """Requests of one client in ten minutes. `shape`: of the distribution of the gaps."""

    begin_s: float
    rate: float
    family: str
    shape: float


def read_rates(path: Path, day: int) -> list[ClientRate]:
    """Reads the windows of a day in which the client sent requests with a known distribution."""
    found: list[ClientRate] = []
    with path.open(newline="") as file:
        for begin, rate, _, family, shape, *_ in csv.reader(file):
            begin_s = float(begin) - day * _DAY_S
            if 0 <= begin_s < _DAY_S and float(rate) > 0:
                found.append(ClientRate(begin_s, float(rate), family, float(shape or 0)))
    return found


def arrivals(
    rates: Sequence[ClientRate], scale: float, random: np.random.Generator
) -> Iterator[float]:
    """Yields the times of one client's requests. Gaps are drawn in expected
    requests, with a mean of one, and each window passes as many as its scaled rate says:

        windows of 600 s with 6 and 12 expected requests: a gap of 9 from 0 on ends at 600 + 150 s
    """
    gone, due = 0.0, None
    for window in rates:
        count = scale * window.rate * _WINDOW_S  # expected requests of the window
        if due is None:
            due = random.uniform() * _gap(window, random)
        while due < gone + count:
            yield window.begin_s + (due - gone) / count * _WINDOW_S
            due += _gap(window, random)
        gone += count


def _gap(window: ClientRate, random: np.random.Generator) -> float:
    """Returns a gap of the window's distribution with a mean of one."""
    if window.family == "Gamma":
        return float(random.gamma(window.shape, 1 / window.shape))
    if window.family == "Weibull":
        return float(random.weibull(window.shape)) / math.gamma(1 + 1 / window.shape)
    return float(random.exponential())


def day_of(folder: Path, day: int, rate: float, seed: int) -> list[float]:
    """Returns the times of all clients' requests in order; `rate`: of the whole day, in the
    mean."""
    clients = [read_rates(path, day) for path in sorted(folder.glob("*-trace.csv"))]
    total = sum(window.rate for client in clients for window in client) * _WINDOW_S
    if not total:
        raise SystemExit(f"{folder} has no requests on day {day}.")
    random = np.random.default_rng(seed)
    scale = rate * _DAY_S / total
    return sorted(at for client in clients for at in arrivals(client, scale, random))


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a category, such as data/language/m-small")
    parser.add_argument("--lengths", type=Path, required=True, help="a trace with the lengths")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--day", type=int, default=1, help="of the fortnight; the first is 0")
    parser.add_argument("--rate", type=float, default=0.15, help="mean requests per second")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(given)
    times = day_of(options.folder, options.day, options.rate, options.seed)
    rows = read_trace(options.lengths).rows
    chosen = np.random.default_rng(options.seed + 1).integers(len(rows), size=len(times))
    with options.out.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["at_s", "prompt_tokens", "output_tokens"])
        for at, index in zip(times, chosen, strict=True):
            out.writerow([f"{at:.3f}", rows[index].prompt_tokens, rows[index].output_tokens])
    print(f"{len(times)} requests of day {options.day} in {options.out}")
    return 0
