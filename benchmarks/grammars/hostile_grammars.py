"""Measures a small request's latency beside 64 clients with hostile grammars.

    python benchmarks/run.py hostile_grammars
    python benchmarks/run.py hostile_grammars --same
    python benchmarks/run.py hostile_grammars --only "a: a a" --seconds 20 --attention-ranks 1

Starts a server with the demonstration model. For each grammar, 64 clients repeatedly request 96
tokens. Each request has a grammar that the server has not seen, because a comment or a title
differs. (With --same a grammar is compiled once, and all clients run at once.) Another client sends
requests for 8 tokens, one after the other. The table has the times of these requests, and the
statuses of the 64 clients' requests. The first row is without a grammar.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import socket
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import httpx
import numpy as np

from harness.environment import describe_environment

NUM_CLIENTS = 64


def _schema(schema: dict[str, Any]) -> tuple[str, str]:
    return "guided_json", json.dumps({"title": "NUMBER", **schema})


def _lark(source: str) -> tuple[str, str]:
    return "guided_grammar", source + "\n// NUMBER"


def _deep_any_of(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [{"type": "array", "items": schema}, {"type": "string", "minLength": 3}]}
    return schema


def _tag(i: int) -> dict[str, Any]:
    way: dict[str, Any] = {"anyOf": [{"type": "string", "pattern": ".*a.{12}"}, {"type": "array"}]}
    return {"begin": f"a{i}x", "schema": way, "end": f"</a{i}>"}


_TAGS = {
    "type": "structural_tag",
    "triggers": ["NUMBER", "a"],
    "structures": [_tag(i) for i in range(99)],
}
_PATTERNS = {f"^[a-z]{{1,{i + 1}}}x{i}$": {"type": "string"} for i in range(40)}
_ALTERNATIVES = "|".join(f".*{letter}.{{{i}}}" for i, letter in enumerate("abcdefghij", 5))
GRAMMARS: dict[str, tuple[str, str]] = {
    "a: a a": _lark("start: a\na: a a | /[a-z ]/"),
    "s: s s s": _lark('start: s\ns: s s s | s s | /[a-z]/ | " "'),
    "empty rules": _lark('start: a\na: a a a | b | ""\nb: a b | /[a-z ]/ | ""'),
    "right recursion": _lark("start: a\na: b a | b\nb: /[a-z ]/ | /[a-z ]/ b"),
    "700 alternatives": _lark(
        "start: x+\nx: "
        + " | ".join(f"/[a-z ]/ y{i}" for i in range(700))
        + "".join(f"\ny{i}: /[a-z ]/" for i in range(700))
    ),
    "nested counts": ("guided_regex", "([a-z ]{1,500}){1,500}(NUMBER)?"),
    "regex alternatives": ("guided_regex", f"({_ALTERNATIVES}|NUMBER)"),
    "deep anyOf": _schema(_deep_any_of(12)),
    "patternProperties": _schema({"type": "object", "patternProperties": _PATTERNS}),
    "large enum": _schema({"enum": [f"{'the king ' * (i % 5)}{i}" for i in range(1500)]}),
    "allOf": _schema({"allOf": [{"type": "string", "pattern": f"^.*{c}.*$"} for c in "abcdef"]}),
    "unended string": _schema({"type": "string", "minLength": 2000}),
    "tags": ("response_format", json.dumps(_TAGS)),
}


async def _attack(
    client: httpx.AsyncClient, case: tuple[str, str] | None, is_same: bool, ends: Counter[str]
) -> None:
    for number in itertools.count():
        body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 96, "ignore_eos": True}
        if case is not None:
            name, source = case
            unique = f"{id(asyncio.current_task())}{number}"
            source = source.replace("NUMBER", "0" if is_same else unique)
            body[name] = json.loads(source) if name == "response_format" else source
        try:
            answer = await client.post("/v1/completions", json=body)
        except httpx.HTTPError:
            ends["lost"] += 1
            continue
        ends[str(answer.status_code)] += 1
        if answer.status_code != 200:
            await asyncio.sleep(0.02)


async def _measure(
    url: str, case: tuple[str, str] | None, is_same: bool, seconds: float
) -> tuple[Any, Counter[str]]:
    limits, ends, delays = httpx.Limits(max_connections=None), Counter[str](), []
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        attackers = [
            asyncio.create_task(_attack(client, case, is_same, ends)) for _ in range(NUM_CLIENTS)
        ]
        await asyncio.sleep(1.0)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            clock = time.perf_counter()
            body = {"prompt": "The sun", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            delays.append(time.perf_counter() - clock)
        for attacker in attackers:
            attacker.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)
    await asyncio.sleep(0.5)
    return np.array(delays), ends


def _serve(options: argparse.Namespace) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moe_serve", "serve", "--port", str(port)]
    if options.attention_ranks:
        ranks = str(options.attention_ranks)
        command += ["--attention-ranks", ranks, "--expert-ranks", "1"]
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return server, url
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    server.kill()
    raise SystemExit("the server did not become ready")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="for each grammar")
    parser.add_argument("--only", help="one grammar, by its name")
    parser.add_argument("--same", action="store_true", help="each grammar is always the same")
    parser.add_argument("--attention-ranks", type=int, default=0)
    options = parser.parse_args()
    names = [options.only] if options.only else list(GRAMMARS)
    server, url = _serve(options)
    about = describe_environment()
    print(f"{about['cpu']}, {about['cores']} cores; {NUM_CLIENTS} clients")
    print(
        f"{'grammar':<20}{'requests':>9}{'median s':>10}{'p99 s':>8}{'max s':>8}{'ratio':>7}  ends"
    )
    base = 0.0
    try:
        for name in (None, *names):
            case = None if name is None else GRAMMARS[name]
            delays, ends = asyncio.run(_measure(url, case, options.same, options.seconds))
            p99 = float(np.percentile(delays, 99))
            base = base or p99
            columns = f"{np.median(delays):>10.3f}{p99:>8.3f}{delays.max():>8.3f}{p99 / base:>7.2f}"
            print(f"{name or 'none':<20}{len(delays):>9}{columns}  {dict(ends)}", flush=True)
    finally:
        server.terminate()
        server.wait()
    return 0
