"""Offline speed of an engine on one checkpoint, beside the machine's limits and a peer.

    python benchmarks/engine.py moe_serve/demo_model --peer transformers --json build/engine.json

See benchmarks/README.md for what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, fields
from pathlib import Path

from harness.engine_table import print_tables
from harness.engines import DTYPES, TRANSFORMERS_EXPERTS
from harness.environment import describe_environment
from harness.machine import measure_limits
from harness.model_size import read_model_size
from harness.roofline import roofline
from harness.work import Work
from harness.worker import Result, run_in_process


def main() -> int:
    arguments = _parser().parse_args()
    work = Work(**{field.name: getattr(arguments, field.name) for field in fields(Work)})
    size = read_model_size(arguments.model, arguments.dtype)
    config = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))
    limits = measure_limits(arguments.threads)
    names = [] if arguments.no_own else ["moe-serve"]
    names += [f"transformers/{e}" for e in TRANSFORMERS_EXPERTS] if arguments.peer else []
    results: list[Result] = []
    for name in names:
        sys.stderr.write(f"{name} ...\n")
        results.append(
            run_in_process(
                name,
                arguments.model,
                arguments.dtype,
                arguments.threads,
                int(config["vocab_size"]),
                work,
            )
        )
    best = roofline(limits, size, work)
    print_tables(arguments.model.name, size, limits, best, results)
    if arguments.json:
        report = {
            "environment": describe_environment(),
            "model": asdict(size) | {"name": arguments.model.name},
            "machine": asdict(limits),
            "work": asdict(work),
            "limits": asdict(best),
            "results": [asdict(result) for result in results],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if any(r.error for r in results if r.engine == "moe-serve") else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Offline speed of an engine.")
    parser.add_argument("model", type=Path, help="checkpoint folder in Hugging Face layout")
    parser.add_argument("--peer", choices=["transformers"], help="run the same work through it too")
    parser.add_argument("--no-own", action="store_true", help="leave moe-serve out")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: the checkpoint's")
    parser.add_argument("--json", type=Path, help="write everything, each run included, here")
    for field in fields(Work):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=field.default, help="default %(default)s")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
