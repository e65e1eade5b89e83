"""Measures the cost of HTTP: tokens per second of an engine alone and behind the server.

    python benchmarks/run.py http_overhead --streams 64 --rounds 9 --json build/http_overhead.json

Rounds of both take turns, in an order that changes; a ratio compares two neighbouring rounds. On a
machine with other work, the CPU time of a token is more reliable than the clock; the output has
both. The exit status is 1 if the whole interval of the clock's ratio is below 1 - --max-loss.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from harness.environment import write_report
from moe_serve.config.sections import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from serving.many_streams import Body, bodies, stream_all
from soak.served import Served

_VOCAB_SIZE = 4096
_NUM_RESAMPLES = 4000
_NUM_PAGES = 4096


def main() -> int:
    arguments = _parser().parse_args()
    config = EngineConfig(
        speculation=SpeculationConfig(method="off"),
        model=ModelConfig(num_threads=1),
        cache=CacheConfig(num_pages=_NUM_PAGES),
    )
    built = build_engine(config)
    rounds = []
    with Served(0, 0, 1.0, num_pages=_NUM_PAGES, speculation="off") as served:
        for number in range(arguments.rounds + 1):
            asked = bodies(
                arguments.streams, arguments.prompt, arguments.output, _VOCAB_SIZE, number
            )
            if number % 2:
                engine = _engine_round(built, asked)
                http = _http_round(served, asked)
            else:
                http = _http_round(served, asked)
                engine = _engine_round(built, asked)
            if number:  # the first is to warm up
                rounds.append({"engine": engine, "http": http})
        served.stop()
    report = _report(rounds)
    _print(report, arguments)
    write_report(arguments.json, {**report, "rounds": rounds})
    return 1 if report["speed_ratio"][2] < 1 - arguments.max_loss else 0


def _engine_round(built: BuiltEngine, asked: list[Body]) -> dict[str, float]:
    clock, cpu = time.monotonic(), time.process_time()
    for number, body in enumerate(asked):
        prompt: Any = body["prompt"]
        limit: Any = body["max_tokens"]
        built.engine.add(
            GenerationRequest(
                request_id=str(number),
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True),
            )
        )
    num_tokens = 0
    while built.engine.has_work:
        num_tokens += sum(len(delta.token_ids) for delta in built.engine.step())
    return _figures(time.monotonic() - clock, time.process_time() - cpu, num_tokens)


def _http_round(served: Served, asked: list[Body]) -> dict[str, float]:
    cpu = sum(served.process.cpu_times()[:2])
    streamed = asyncio.run(stream_all(served.url, asked))
    if streamed.errors:
        raise SystemExit(f"{len(streamed.errors)} streams failed: {streamed.errors[0]}")
    spent = sum(served.process.cpu_times()[:2]) - cpu
    return _figures(streamed.seconds, spent, streamed.num_tokens)


def _figures(seconds: float, cpu_s: float, num_tokens: int) -> dict[str, float]:
    return {
        "tokens_per_s": round(num_tokens / seconds, 1),
        "cpu_us_per_token": round(1e6 * cpu_s / num_tokens, 2),
        "seconds": round(seconds, 3),
    }


def _report(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Returns (low, median, high) of each ratio, HTTP over engine; 95% bootstrap over rounds."""
    rng = np.random.default_rng(1)
    found: dict[str, Any] = {}
    for label, name in (("speed_ratio", "tokens_per_s"), ("cpu_ratio", "cpu_us_per_token")):
        ratios = np.array([item["http"][name] / item["engine"][name] for item in rounds])
        drawn = rng.choice(ratios, (_NUM_RESAMPLES, len(ratios)))
        low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
        found[label] = [round(float(x), 3) for x in (low, np.median(ratios), high)]
    return found


def _print(report: dict[str, Any], arguments: argparse.Namespace) -> None:
    table = Table(f"{arguments.streams} streams, HTTP over engine", "95%, low", "median", "high")
    for name in ("speed_ratio", "cpu_ratio"):
        table.add_row(name, *map(str, report[name]))
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64, help="default %(default)s")
    parser.add_argument("--prompt", type=int, default=32, help="tokens, default %(default)s")
    parser.add_argument("--output", type=int, default=128, help="tokens, default %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="of each way, default %(default)s")
    parser.add_argument("--max-loss", type=float, default=0.15, help="default %(default)s")
    parser.add_argument("--json", type=Path)
    return parser
