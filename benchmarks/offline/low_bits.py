r"""Measures a model in floats and in few bits, and llama.cpp, in turns.

    python benchmarks/run.py low_bits MODEL --own int8=E4R8 --own exact=E4R8 --own int8=INT4 \
        --llama PYTHON --gguf q4_0=model-q4_0.gguf --gguf q8_0=model-q8_0.gguf

MODEL is a checkpoint in floats. `--own PRODUCTS=FOLDER` is the same model in few bits, multiplied
by `model.low_bit_products`; `--gguf TYPE=FILE` the same for llama.cpp, as its `llama-quantize`
writes it. All are loaded at once, so their memory must be there. benchmarks/README.md explains the
figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, fields
from itertools import zip_longest
from pathlib import Path

from harness.environment import child_environment
from harness.machine import MachineLimits, measure_limits
from harness.model_size import read_model_size
from harness.work import Work
from offline.duel import OWN, Entrant, Setup, run_duel
from offline.result import Figures, Result, figures_of


def main() -> int:
    arguments = _parser().parse_args()
    setup = Setup(
        model=arguments.model,
        gguf=None,
        dtype=read_model_size(arguments.model, "auto").dtype,
        num_threads=arguments.threads,
        vocab_size=int(json.loads((arguments.model / "config.json").read_text())["vocab_size"]),
        work=Work(**{field.name: getattr(arguments, field.name) for field in fields(Work)}),
    )
    entrants = [Entrant(engine=OWN)]
    entrants += [Entrant(engine=OWN, variant=v, weights=p) for v, p in arguments.own]
    python = arguments.llama or sys.executable
    entrants += [
        Entrant(engine="llama.cpp", variant=variant, weights=path, python=python)
        for variant, path in arguments.gguf
    ]
    machine = measure_limits(setup.num_threads)
    results = run_duel(entrants, setup)
    figures = [figures_of([result], setup.work) for result in results]
    own = [_checkpoint_bytes(e.weights or setup.model) for e in entrants if e.engine == OWN]
    print_table(machine, results, figures, own)
    if arguments.json:
        rows = [
            {
                "engine": r.engine,
                "error": r.error,
                "versions": r.versions,
                "samples_s": r.samples_s,
                **(asdict(f) if f else {}),
            }
            for r, f in zip(results, figures, strict=True)
        ]
        limits = {"read_gb_s": machine.read_gb_s, "busy_cores": machine.busy_cores}
        arguments.json.write_text(json.dumps({"limits": limits, "results": rows}, indent=1))
    return 1 if any(result.error for result in results) else 0


def print_table(
    machine: MachineLimits,
    results: list[Result],
    figures: list[Figures | None],
    checkpoint_bytes: list[int],
) -> None:
    """Prints a row for each entrant, with its ratios over the first one; our own come first, and
    have a checkpoint each.
    """
    interpreter = _interpreter_bytes()
    sys.stdout.write(
        f"reads {machine.read_gb_s:.1f} GB/s, others use {machine.busy_cores:.1f} cores, "
        f"an interpreter takes {interpreter / 2**30:.2f} GiB\n"
        f"{'':34}{'one stream':>18}{'many, decode':>20}{'prefill':>20}{'peak':>10}{'load':>9}"
        f"{'weights':>9}\n"
    )
    first = figures[0]
    for result, own, stored in zip_longest(results, figures, checkpoint_bytes):
        if own is None or first is None:
            sys.stdout.write(f"{result.engine:34}{result.error}\n")
            continue
        speeds = "".join(
            f"{getattr(own, key):12.1f}{getattr(own, key) / (getattr(first, key) or 1.0):6.2f}x "
            for key in ("single_decode_tok_s", "batch_decode_tok_s", "prefill_tok_s")
        )
        weights = own.peak_gib * 2**30 - interpreter - (result.cache_bytes or 0)
        share = f"{weights / stored:8.2f}x" if stored else ""
        sys.stdout.write(
            f"{result.engine:34}{speeds}{own.peak_gib:6.2f} GiB{own.load_s:7.1f} s{share}\n"
        )


def _checkpoint_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _interpreter_bytes() -> int:
    """Returns the largest size of a process that imports moe-serve and loads nothing."""
    program = "import resource, moe_serve.offline.llm as _; usage = resource.getrusage(0)"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; print(usage.ru_maxrss)"],
        env=child_environment(),
        capture_output=True,
        check=True,
        text=True,
    )
    return int(done.stdout) * 1024


def _named(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, Path(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="checkpoint folder in Hugging Face layout")
    for flag in ("--own", "--gguf"):
        parser.add_argument(flag, action="append", type=_named, default=[], metavar="NAME=PATH")
    parser.add_argument("--llama", help="the interpreter that has llama-cpp-python")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write everything here")
    for field in fields(Work):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=field.default, help="default %(default)s")
    return parser
