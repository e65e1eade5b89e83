"""Measures offline speed on one checkpoint, beside the machine's limits and other engines.

    python benchmarks/run.py engine moe_serve/demo_model --peer transformers

benchmarks/README.md explains the figures and the environments of the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path

from harness.environment import describe_environment
from harness.machine import measure_limits
from harness.model_size import read_model_size
from harness.work import DTYPES, Work
from offline.duel import OWN, Entrant, Setup, parse_peer, run_duel
from offline.report import Duel, Report, print_tables


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engines are ended too
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.gguf is None and any(peer.engine == "llama.cpp" for peer in arguments.peer):
        parser.error("llama.cpp reads a GGUF file: make one with write_gguf.py and give --gguf")
    if arguments.merge and arguments.json is None:
        parser.error("--merge adds to the file of --json, which is missing")
    setup = _setup(arguments)
    report = Report(
        model_name=arguments.model.name,
        model=read_model_size(arguments.model, setup.dtype),
        num_threads=setup.num_threads,
        work=setup.work,
        environment=describe_environment(),
    )
    if arguments.merge and arguments.json.exists():
        report = report.merged(arguments.json)
    own = [] if arguments.no_own else [Entrant(engine=OWN)]
    for peer in arguments.peer or [None]:
        entrants = [*own, peer] if peer else own
        sys.stderr.write(" and ".join(entrant.name for entrant in entrants) + "\n")
        machine = measure_limits(setup.num_threads)
        results = run_duel(entrants, setup)
        report = report.with_duel(Duel(machine=machine, results=tuple(results)))
        if arguments.json:
            report.write(arguments.json)
    print_tables(report)
    return 1 if any(duel.own and duel.own.error for duel in report.duels) else 0


def _setup(arguments: argparse.Namespace) -> Setup:
    config = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))
    return Setup(
        model=arguments.model,
        gguf=arguments.gguf,
        dtype=read_model_size(arguments.model, arguments.dtype).dtype,
        num_threads=arguments.threads,
        vocab_size=int(config["vocab_size"]),
        work=Work(**{field.name: getattr(arguments, field.name) for field in fields(Work)}),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="checkpoint folder in Hugging Face layout")
    parser.add_argument(
        "--peer",
        action="append",
        type=parse_peer,
        default=[],
        metavar="NAME[/VARIANT][=PYTHON]",
        help="llama.cpp, vllm, vllm-zentorch or transformers, and the interpreter that has it; "
        "may be given several times",
    )
    parser.add_argument("--gguf", type=Path, help="the checkpoint for llama.cpp (write_gguf.py)")
    parser.add_argument("--no-own", action="store_true", help="leave moe-serve out")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: the checkpoint's")
    parser.add_argument("--json", type=Path, help="write everything here, after each peer")
    parser.add_argument("--merge", action="store_true", help="keep the other peers in that file")
    for field in fields(Work):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=field.default, help="default %(default)s")
    return parser
