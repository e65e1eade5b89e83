"""Measures the speed of a server over HTTP in a closed loop of clients.

    python benchmarks/run.py serving --spawn "moe_serve/demo_model" --clients 16
    python benchmarks/run.py serving --url http://127.0.0.1:8000 --peer-url http://127.0.0.1:9000

See benchmarks/README.md, and docs/guide/bench.md for what the figures mean.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from harness.environment import describe_environment
from harness.spawn import spawned_server
from moe_serve.bench.bench_run import run_bench
from moe_serve.bench.client.endpoint import Endpoint, RunPlan
from moe_serve.bench.report.compare import print_comparison
from moe_serve.bench.report.report import Report
from moe_serve.bench.report.report_table import print_report
from moe_serve.bench.workload.workload import Lengths, Workload
from moe_serve.errors import BenchError

_API_KEY_VARIABLE = "OPENAI_API_KEY"


def main() -> int:
    arguments = _parser().parse_args()
    console = Console(highlight=False)
    server = nullcontext(arguments.url) if arguments.url else spawned_server(arguments.spawn)
    try:
        with server as url:
            reports = [_measure(arguments, url)]
        if arguments.peer_url:
            reports.append(_measure(arguments, arguments.peer_url))
    except BenchError as error:
        raise SystemExit(f"error: {error}") from None
    for number, report in enumerate(reports):
        print_report(console, report)
        if arguments.json:
            path = arguments.json
            path = path if number == 0 else path.with_stem(f"{path.stem}-peer")
            report.write(path, has_records=True)
    if len(reports) == 2:
        print_comparison(console, reports[0], reports[1])
    return 1 if any(report.summary.num_failed for report in reports) else 0


def _measure(arguments: argparse.Namespace, url: str) -> Report:
    report = asyncio.run(run_bench(_plan(arguments, url)))
    return replace(report, client=describe_environment())


def _plan(arguments: argparse.Namespace, url: str) -> RunPlan:
    return RunPlan(
        url=url,
        workload=Workload(
            seed=arguments.seed,
            concurrency=arguments.clients,
            num_requests=arguments.requests,
            prompt_tokens=Lengths(low=arguments.min_prompt, high=arguments.max_prompt),
            output_tokens=Lengths(low=arguments.max_tokens, high=arguments.max_tokens),
        ),
        endpoint=Endpoint(name="completions", model=""),
        api_key=os.environ.get(_API_KEY_VARIABLE),
        data="words" if arguments.text else "tokens",
        vocab_size=arguments.vocab_size,
        num_warm_up=arguments.clients,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--url", help="a running server, e.g. http://127.0.0.1:8000")
    which.add_argument("--spawn", metavar="OPTIONS", help="start `moe-serve serve OPTIONS` for it")
    parser.add_argument("--peer-url", help="a second server that gets the same load afterwards")
    parser.add_argument("--clients", type=int, default=16, help="default %(default)s")
    parser.add_argument("--requests", type=int, default=128, help="default %(default)s")
    parser.add_argument("--min-prompt", type=int, default=32, help="tokens, default %(default)s")
    parser.add_argument("--max-prompt", type=int, default=512, help="tokens, default %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, help="per answer, %(default)s")
    parser.add_argument("--vocab-size", type=int, default=4096, help="ids below, %(default)s")
    parser.add_argument("--text", action="store_true", help="send words, not token ids")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser
