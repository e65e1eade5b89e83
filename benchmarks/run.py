"""Runs a benchmark by its name, or lists the names.

    python benchmarks/run.py                              list the names
    python benchmarks/run.py engine --help                list the options of a benchmark
    python benchmarks/run.py engine moe_serve/demo_model --peer transformers

Modules below `benchmarks/` and `scripts/` can be imported during the run. A benchmark is a module
with a `main()` that reads `sys.argv` and returns the exit status; add a line below for a new one.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# Name -> module. The list is printed in this order.
BENCHMARKS = {
    "engine": "offline.engine",
    "adapters": "offline.adapters",
    "bitdelta": "offline.bitdelta",
    "adapter_loads": "offline.adapter_loads",
    "low_bits": "offline.low_bits",
    "packed_model": "offline.packed_model",
    "load_memory": "offline.load_memory",
    "step_parts": "offline.step_parts",
    "packed_serving": "serving.packed_serving",
    "serving": "serving.serving",
    "http_overhead": "serving.http_overhead",
    "streams": "serving.streams",
    "tracing": "serving.tracing",
    "prefix_replay": "serving.prefix_replay",
    "cells": "serving.cells",
    "cells_bar": "serving.cells_bar",
    "published_rows": "simulation.published_rows",
    "own_runs": "simulation.own_runs",
    "http_runs": "simulation.http_runs",
    "at_once": "simulation.at_once",
    "layouts": "simulation.layouts",
    "roles": "simulation.roles",
    "autoscaling": "simulation.autoscaling",
    "servegen_day": "simulation.servegen_day",
    "kernels": "kernel_bench.kernels",
    "cpu_kernels": "kernel_bench.cpu_kernels",
    "drafting": "kernel_bench.drafting",
    "pingpong": "pingpong.pingpong",
    "ahead": "pingpong.ahead",
    "rank_calls": "pingpong.rank_calls",
    "placement": "placement.placement",
    "batching": "batching.batching",
    "decisions": "batching.decisions",
    "request_prediction": "batching.request_prediction",
    "layered_prefill": "batching.layered_prefill",
    "expert_memory": "expert_memory.expert_memory",
    "replica_choice": "expert_memory.replica_choice",
    "live_balancing": "expert_memory.live_balancing",
    "grammar_masks": "grammars.grammar_masks",
    "hostile_grammars": "grammars.hostile_grammars",
    "speculation": "speculation.speculation",
    "kv_tiers": "kv_tiers.kv_tiers",
    "lost_rank": "kv_tiers.lost_rank",
    "kv_dtype": "kv_tiers.kv_dtype",
    "mtp": "speculation.mtp",
    "parcels": "cells.parcels",
    "exchanges": "cells.exchanges",
    "soak": "soak.soak",
    "fault_soak": "soak.fault_soak",
    "cells_soak": "soak.cells_soak",
    "adapter_soak": "soak.adapter_soak",
    "deadlines": "deadlines.deadlines",
    "length_answers": "lengths.answers",
    "lengths": "lengths.lengths",
    "gpu_engine": "gpu_bench.gpu_engine",
    "gpu_all": "gpu_bench.gpu_all",
}


def main() -> int:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("python benchmarks/run.py NAME [arguments of the benchmark]\n")
        for each in BENCHMARKS:
            print(f"  {each:20}{description(each)}")
        return 0
    if name not in BENCHMARKS:
        names = ", ".join(BENCHMARKS)
        print(f"There is no benchmark {name!r}. The names are: {names}.", file=sys.stderr)
        return 2
    for folder in (FOLDER.parent / "scripts", FOLDER):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    sys.argv = [f"run.py {name}", *arguments]
    status: int | None = importlib.import_module(BENCHMARKS[name]).main()
    return status or 0


def description(name: str) -> str:
    """Reads the first line of a benchmark's docstring, without importing the benchmark."""
    text = module_path(name).read_text("utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def module_path(name: str) -> Path:
    return FOLDER / f"{BENCHMARKS[name].replace('.', '/')}.py"


if __name__ == "__main__":
    sys.exit(main())
