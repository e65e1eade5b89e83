"""Speed of a server over HTTP: N clients in a closed loop, streaming completions.

    python benchmarks/serving.py --spawn "moe_serve/demo_model" --clients 16
    python benchmarks/serving.py --url http://127.0.0.1:8000 --peer-url http://127.0.0.1:9000

See benchmarks/README.md for what the figures mean.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness.environment import describe_environment
from harness.load import Load, Summary, run_load
from harness.spawn import spawned_server

_API_KEY_VARIABLE = "OPENAI_API_KEY"


def main() -> int:
    arguments = _parser().parse_args()
    load = Load(
        num_clients=arguments.clients,
        num_requests=arguments.requests,
        min_prompt=arguments.min_prompt,
        max_prompt=arguments.max_prompt,
        max_tokens=arguments.max_tokens,
        vocab_size=arguments.vocab_size,
        is_text=arguments.text,
        seed=arguments.seed,
    )
    key = os.environ.get(_API_KEY_VARIABLE)
    server = nullcontext(arguments.url) if arguments.url else spawned_server(arguments.spawn)
    with server as url:
        summaries = [asyncio.run(run_load(url, load, key))]
    if arguments.peer_url:
        summaries.append(asyncio.run(run_load(arguments.peer_url, load, key)))
    _print_table(load, summaries)
    if arguments.json:
        report = {
            "environment": describe_environment(),
            "load": asdict(load),
            "servers": [_as_json(summary) for summary in summaries],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if any(summary.errors for summary in summaries) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Speed of a server over HTTP.")
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


def _print_table(load: Load, summaries: list[Summary]) -> None:
    table = Table(f"{load.num_clients} clients, {load.num_requests} requests")
    for name in ("server", "peer")[: len(summaries)]:
        table.add_column(name, justify="right")
    if len(summaries) == 2:
        table.add_column("ratio", justify="right")
    for label, values, is_time in _rows(summaries):
        cells = [f"{value:,.1f}" for value in values]
        if len(values) == 2 and all(values):
            ratio = values[1] / values[0] if is_time else values[0] / values[1]
            cells.append(f"{ratio:.2f}x")
        table.add_row(label, *cells)
    console = Console()
    console.print(table)
    for summary in summaries:
        for error, times in summary.errors.items():
            console.print(f"{summary.url}: {times} x {error}", markup=False)


def _rows(summaries: list[Summary]) -> list[tuple[str, list[float], bool]]:
    """(label, one value per server, is less better)."""
    return [
        ("answered", [float(s.num_ok) for s in summaries], False),
        ("failed", [float(sum(s.errors.values())) for s in summaries], True),
        ("requests/s", [s.requests_per_s for s in summaries], False),
        ("output tok/s", [s.output_tok_s for s in summaries], False),
        ("total tok/s", [s.total_tok_s for s in summaries], False),
        ("TTFT p50 (ms)", [s.ttft_ms.p50 for s in summaries], True),
        ("TTFT p99 (ms)", [s.ttft_ms.p99 for s in summaries], True),
        ("TPOT p50 (ms)", [s.tpot_ms.p50 for s in summaries], True),
        ("TPOT p99 (ms)", [s.tpot_ms.p99 for s in summaries], True),
        ("end to end p50 (ms)", [s.e2e_ms.p50 for s in summaries], True),
        ("end to end p99 (ms)", [s.e2e_ms.p99 for s in summaries], True),
    ]


def _as_json(summary: Summary) -> dict[str, object]:
    rates = ("requests_per_s", "output_tok_s", "total_tok_s")
    return asdict(summary) | {name: getattr(summary, name) for name in rates}


if __name__ == "__main__":
    raise SystemExit(main())
