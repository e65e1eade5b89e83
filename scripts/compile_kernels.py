"""Compiles every Triton kernel in every shipped configuration, without a GPU.

    python scripts/compile_kernels.py                 compile, print the facts, apply the rules
    python scripts/compile_kernels.py --check         compare with docs/reference/kernel-coverage.md
    python scripts/compile_kernels.py --write         update that page
    python scripts/compile_kernels.py --only attention --targets 90
    python scripts/compile_kernels.py --sample cover  few cases, which cover every feature
    python scripts/compile_kernels.py --sample quick  each kernel once, and the rest of the cover
                                                      only translated into Triton's own language

The rules: no stack, no spills, no more shared memory than the chip has, and matrix instructions if
the case requires them. Facts are cached by source, configuration and triton version; `--no-cache`
compiles anew.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time

os.environ.pop("TRITON_INTERPRET", None)  # with it, decorated kernels would not compile

import triton

from kernel_compilation import pool, table
from kernel_compilation.cover import broken_rules, covering, quick
from kernel_compilation.facts import CompiledFacts
from kernel_compilation.pool import Job, run_jobs
from moe_kernels.gpu.compile_case import TARGETS, CompileCase, find_cases

SAMPLES = {"cover": covering, "quick": quick}
FACT_COLUMNS = ("regs", "stack", "shared", "mma", "wgmma", "tcgen05", "TMA", "spills", "s")


def main() -> int:
    arguments = parse_arguments()
    if arguments.no_cache:
        shutil.rmtree(pool.facts_folder(), ignore_errors=True)
    cases = {case.name: case for case in find_cases() if arguments.only in case.name}
    jobs = [
        Job(name, target)
        for name, case in cases.items()
        for target in case.targets
        if target in arguments.targets
    ]
    if arguments.sample:
        jobs = SAMPLES[arguments.sample](cases, jobs)
    facts, problems = compile_all(cases, jobs, arguments.workers)
    is_whole = not arguments.only and set(arguments.targets) == set(TARGETS)
    if is_whole and not arguments.sample and (arguments.check or arguments.write):
        problems += publish(table.render(cases, facts, triton.__version__), arguments)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels ahead of time.")
    parser.add_argument("--check", action="store_true", help="fail if the page is outdated")
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    parser.add_argument("--sample", choices=SAMPLES, help="run few cases")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--targets", type=int, nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-cache", action="store_true", help="ignore cached results")
    return parser.parse_args()


def compile_all(
    cases: dict[str, CompileCase], jobs: list[Job], num_workers: int
) -> tuple[dict[tuple[str, int], CompiledFacts], list[str]]:
    """Returns the facts by case and target, and a sentence for each case that breaks a rule or
    fails."""
    started = time.perf_counter()
    facts: dict[tuple[str, int], CompiledFacts] = {}
    problems: list[str] = []
    num_cached = 0
    width = max((len(name) for name in cases), default=0)
    print(f"{'case':{width}} sm  " + "".join(f"{name:>8}" for name in FACT_COLUMNS))
    for job, outcome in run_jobs(cases, jobs, num_workers):
        num_cached += outcome.is_cached
        if outcome.error:
            problems.append(f"{job.case} on sm_{job.target}: {outcome.error}")
        if outcome.facts is None or not job.is_compiled:
            continue
        facts[job.case, job.target] = outcome.facts
        problems += broken_rules(cases[job.case], job.target, outcome.facts)
        print(f"{job.case:{width}} {job.target:<4}{_line(outcome.facts)}", flush=True)
    seconds = time.perf_counter() - started
    num_compiled = sum(job.is_compiled for job in jobs)
    print(
        f"{num_compiled} compilations and {len(jobs) - num_compiled} translations "
        f"({num_cached} from the cache) in {seconds:.0f} s"
    )
    return facts, problems


def _line(facts: CompiledFacts) -> str:
    values = (
        facts.registers,
        facts.stack,
        facts.shared,
        facts.num_mma,
        facts.num_wgmma,
        facts.num_tcgen05,
        facts.num_tma,
        facts.num_local,
        facts.seconds,
    )
    return "".join(f"{value:>8}" for value in values)


def publish(rendered: str, arguments: argparse.Namespace) -> list[str]:
    """Writes the table, or prints the rows of the page that are outdated."""
    if arguments.write:
        table.BLOCK.write(rendered)
        return []
    stale = table.stale_rows(table.BLOCK.text(), rendered)
    hint = "run: python scripts/compile_kernels.py --write"
    return [f"docs/reference/kernel-coverage.md is out of date at {name}; {hint}" for name in stale]


if __name__ == "__main__":
    sys.exit(main())
