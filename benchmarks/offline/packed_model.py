r"""Loads one packed checkpoint alone, and measures it beside the bytes that its tokens read.

    python benchmarks/run.py packed_model build/gpt-oss-20b --products exact --products int8

For models too large to be loaded twice. benchmarks/README.md explains the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import psutil

from harness.machine import measure_limits
from harness.model_size import StoredBytes, read_stored_bytes
from harness.work import Work
from offline.duel import OWN, Entrant, Setup, run_duel
from offline.result import Figures, Result, figures_of

_ROOM = 1.1  # of the checkpoint, that must be free beside `_ROOM_BYTES`
_ROOM_BYTES = 2**30
_DEFAULTS = {"single_output": 32, "batch_size": 8, "batch_output": 16, "prefill_prompt": 512}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load of the checkpoint, and the read bandwidth just before it."""

    products: str
    read_gb_s: float
    result: Result
    figures: Figures | None


def main() -> int:
    arguments = _parser().parse_args()
    stored = read_stored_bytes(arguments.model)
    free = psutil.virtual_memory().available
    if free < _ROOM * stored.total + _ROOM_BYTES:
        sys.stderr.write(
            f"{arguments.model} has {stored.total / 1e9:.1f} GB, but only {free / 1e9:.1f} GB of "
            "memory are available: end other programs, or use a smaller checkpoint.\n"
        )
        return 2
    config = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))
    setup = Setup(
        model=arguments.model,
        gguf=None,
        dtype="bfloat16",
        num_threads=arguments.threads,
        vocab_size=int(config["vocab_size"]),
        work=Work(**{field.name: getattr(arguments, field.name) for field in fields(Work)}),
        is_read_first=False,
    )
    runs = []
    for products in arguments.products or ["exact"]:
        read_gb_s = measure_limits(setup.num_threads).read_gb_s
        (result,) = run_duel([Entrant(engine=OWN, variant=products)], setup)
        figures = figures_of([result], setup.work)
        runs.append(Run(products=products, read_gb_s=read_gb_s, result=result, figures=figures))
        print_run(runs[-1], stored, setup.work)
    if arguments.json:
        rows = [asdict(run) for run in runs]
        arguments.json.write_text(json.dumps({"stored": asdict(stored), "runs": rows}, indent=1))
    return 1 if any(run.figures is None for run in runs) else 0


def print_run(run: Run, stored: StoredBytes, work: Work) -> None:
    """Prints the figures of a load, and their shares of the limits."""
    if run.figures is None:
        sys.stdout.write(f"{run.products}: {run.result.error}\n")
        return
    f, cache = run.figures, run.result.cache_bytes or 0
    peak = f.peak_gib * 2**30
    lines = [f"{run.products}: {stored.total / 1e9:.2f} GB, reads {run.read_gb_s:.1f} GB/s"]
    for name, num_rows, tok_s in (
        ("one stream", 1, f.single_decode_tok_s),
        (f"{work.batch_size} at once", work.batch_size, f.batch_decode_tok_s),
    ):
        num_bytes = stored.of_step(num_rows)
        gb_s = num_bytes * tok_s / num_rows / 1e9
        lines.append(
            f"  {name:14}{tok_s:8.2f} tok/s, {num_bytes / 1e9:.2f} GB a step, {gb_s:.1f} GB/s: "
            f"{gb_s / run.read_gb_s:.0%} of the bandwidth"
        )
    lines += [
        f"  {'prefill':14}{f.prefill_tok_s:8.2f} tok/s ({work.prefill_prompt} tokens)",
        f"  {'peak':14}{f.peak_gib:8.2f} GiB with {cache / 2**30:.2f} GiB of cache: "
        f"{(peak - cache) / stored.total:.2f} of the checkpoint without it",
        f"  {'load':14}{f.load_s:8.1f} s, {stored.total / f.load_s / 1e9:.2f} GB/s",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="checkpoint folder in Hugging Face layout")
    parser.add_argument(
        "--products",
        action="append",
        choices=("exact", "int8"),
        help="model.low_bit_products; may be given several times, default exact",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write everything here")
    for field in fields(Work):
        default = _DEFAULTS.get(field.name, field.default)
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=default, help="default %(default)s")
    return parser
