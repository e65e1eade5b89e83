"""Measures the kernels beside the device's limits, torch's operators and installed peers.

    python benchmarks/run.py kernels                  the whole table, on a GPU if there is one
    python benchmarks/run.py kernels --save           also write benchmarks/results/<device>/
    python benchmarks/run.py kernels --shapes olmoe --tokens 1 16 --json build/kernels.json

Measures the device's copy bandwidth and matrix rate first, then the experts of a layer (both
products, activation, sorting and combining) and decode attention. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from harness.environment import describe_environment
from kernel_bench.clock import (
    CPU_SIZES,
    CUDA_SIZES,
    SMOKE_SIZES,
    Budget,
    Clock,
    DeviceLimits,
    measure_limits,
)
from kernel_bench.measurement import (
    RESULTS,
    BenchReport,
    Measurement,
    WorkResult,
    device_folder,
    device_name,
    write_kernels,
)
from kernel_bench.runner import run_decode, run_layer
from kernel_bench.shapes import (
    ALL_TOKENS,
    DECODES,
    FEW_TOKENS,
    GPU_DECODES,
    GPU_LAYERS,
    LAYERS,
)

CPU_SHAPES = ("random-1b", "tiny", "decode-tiny")
SMOKE_SHAPES = ("tiny", "decode-tiny")
SMOKE_BUDGET = Budget(min_runs=1, max_runs=2, seconds=0.0)


def main() -> int:
    arguments = parse_arguments()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    if arguments.smoke:
        clock, sizes = Clock(device, SMOKE_BUDGET, flush_bytes=0), SMOKE_SIZES
    else:
        clock = Clock(device, Budget())
        sizes = CUDA_SIZES if device.type == "cuda" else CPU_SIZES
    limits = measure_limits(clock, dtype, sizes)
    report = BenchReport(
        device=device_name(device),
        dtype=arguments.dtype,
        environment=describe_environment(),
        limits=limits,
        results=(),
    )
    saved = RESULTS / device_folder(device) / "kernels.json"
    for result in run_all(arguments, clock, limits):
        report = replace(report, results=(*report.results, result))
        if arguments.save:  # as it goes: a run may be cut
            write_kernels(report, saved, keeps_others=True)
    print_report(report)
    if arguments.json:
        write_kernels(report, arguments.json, keeps_others=False)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [shape.name for shape in (*LAYERS, *DECODES)]
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--shapes", nargs="+", choices=names, metavar="SHAPE", help=str(names))
    parser.add_argument("--tokens", nargs="+", type=int, help="default: 1 to 16384; CPU: a few")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<device>/")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all?")
    arguments = parser.parse_args()
    is_gpu = arguments.device.startswith("cuda")
    default = (*GPU_LAYERS, *GPU_DECODES) if is_gpu else CPU_SHAPES
    arguments.shapes = arguments.shapes or (SMOKE_SHAPES if arguments.smoke else default)
    few = arguments.smoke or not is_gpu
    arguments.tokens = arguments.tokens or (FEW_TOKENS if few else ALL_TOKENS)
    return arguments


def run_all(
    arguments: argparse.Namespace, clock: Clock, limits: DeviceLimits
) -> Iterator[WorkResult]:
    """Measures layer after layer; the weights of a layer are freed before the next one is
    created.
    """
    dtype = getattr(torch, arguments.dtype)
    for layer in LAYERS:
        if layer.name in arguments.shapes:
            yield from run_layer(layer, arguments.tokens, dtype, clock, limits, say)
    for decode in DECODES:
        if decode.name in arguments.shapes:
            yield run_decode(decode, dtype, clock, limits, say)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_WIDTH = 150


def print_report(report: BenchReport) -> None:
    """Prints the limits, one table for each kind of work and set of implementations, and the
    failures.
    """
    console = Console(width=max(_WIDTH, Console().width))
    limits = report.limits
    console.print(
        f"{report.device}, {report.dtype}: copies {limits.copy_gb_s:,.1f} GB/s (read and written), "
        f"multiplies {limits.matrix_gflop_s:,.0f} GFLOP/s"
    )
    for work in dict.fromkeys(result.work for result in report.results):
        rows = [result for result in report.results if result.work == work]
        console.print(_table(work, rows))
    console.print("us, medians; % of the limit; * launched by the host, not replayed as a graph")
    for line in _failures(report):
        console.print(line, markup=False)


def _table(work: str, rows: list[WorkResult]) -> Table:
    table = Table(title=work)
    names = list(dict.fromkeys(m.contestant for row in rows for m in row.measurements))
    table.add_column("shape", no_wrap=True)
    for heading in ("tokens", "limit", "set by", *names):
        table.add_column(heading, justify="right")
    for index, row in enumerate(rows):
        by_name = {m.contestant: m for m in row.measurements}
        is_last = index + 1 == len(rows) or rows[index + 1].shape != row.shape
        table.add_row(
            row.shape,
            str(row.num_tokens),
            f"{row.bound.seconds * 1e6:,.1f}",
            row.bound.set_by,
            *(_cell(by_name.get(name), row.bound.seconds) for name in names),
            end_section=is_last,
        )
    return table


def _cell(measurement: Measurement | None, limit_s: float) -> str:
    if measurement is None or measurement.timing is None:
        return "-"
    timing = measurement.timing
    mark = "*" if timing.mode == "eager" else ""
    return f"{timing.seconds * 1e6:,.1f}{mark} {limit_s / timing.seconds:.0%}"


def _failures(report: BenchReport) -> Iterator[str]:
    """Returns the failure of each implementation, once per shape and message."""
    seen: set[tuple[str, str, str]] = set()
    for row in report.results:
        for m in row.measurements:
            key = (row.shape, m.contestant, m.failure)
            if m.failure and key not in seen:
                seen.add(key)
                yield f"{m.contestant} on {row.shape}, {row.num_tokens} tokens: {m.failure}"
