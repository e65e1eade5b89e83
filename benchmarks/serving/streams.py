"""Opens hundreds of streams at once; counts errors and measures the lag of the event loop.

    python benchmarks/run.py streams --streams 500 --rounds 3 --json build/streams.json

The exit status is 0 only if no stream failed and the 99th percentile of the lag is below --max-lag.
See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from harness.environment import write_report
from harness.spawn import spawned_server
from serving.many_streams import bodies, stream_all
from soak.sample import buckets_of, quantile_of_buckets

_VOCAB_SIZE = 4096
_LAG = "event_loop_lag_seconds"


def main() -> int:
    arguments = _parser().parse_args()
    flags = f"--num-threads 1 --max-queued-requests {arguments.streams}"
    with spawned_server(flags) as url:
        asyncio.run(stream_all(url, bodies(8, 16, 8, _VOCAB_SIZE, 0)))  # warm
        rounds = [_round(url, arguments, seed) for seed in range(1, arguments.rounds + 1)]
    _print(rounds, arguments)
    write_report(arguments.json, {"rounds": rounds})
    is_good = all(
        not item["num_errors"] and item["lag_p99_s"] <= arguments.max_lag for item in rounds
    )
    return 0 if is_good else 1


def _round(url: str, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    before = buckets_of(_metrics(url), _LAG)
    asked = bodies(arguments.streams, arguments.prompt, arguments.output, _VOCAB_SIZE, seed)
    streamed = asyncio.run(stream_all(url, asked))
    after = buckets_of(_metrics(url), _LAG)
    spent = [(end, count - old) for (end, count), (_, old) in zip(after, before, strict=True)]
    return {
        "streams": arguments.streams,
        "seconds": round(streamed.seconds, 2),
        "tokens_per_s": round(streamed.num_tokens / streamed.seconds, 1),
        "num_errors": len(streamed.errors),
        "first_errors": list(streamed.errors[:3]),
        "lag_p50_s": quantile_of_buckets(spent, 0.5),
        "lag_p99_s": quantile_of_buckets(spent, 0.99),
        "lag_max_s": quantile_of_buckets(spent, 1.0),
    }


def _metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text


def _print(rounds: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    table = Table(*[name for name in rounds[0] if name != "first_errors"])
    for item in rounds:
        table.add_row(*(str(value) for name, value in item.items() if name != "first_errors"))
    console = Console(width=110)
    console.print(table)
    console.print(f"lags are the upper ends of buckets; the limit of p99 is {arguments.max_lag} s")
    for item in rounds:
        for error in item["first_errors"]:
            console.print(f"[red]{error}[/red]")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=500, help="default %(default)s")
    parser.add_argument("--prompt", type=int, default=32, help="tokens, default %(default)s")
    parser.add_argument("--output", type=int, default=64, help="tokens, default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--max-lag", type=float, default=0.05, help="seconds, %(default)s")
    parser.add_argument("--json", type=Path)
    return parser
