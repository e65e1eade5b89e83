r"""Serves one packed checkpoint over HTTP, and measures it beside its bytes and the bandwidth.

    python scripts/make_full_size_model.py build/gpt-oss-20b --model gpt-oss-20b
    python benchmarks/run.py packed_serving build/gpt-oss-20b

For models that nearly fill the memory. benchmarks/README.md explains the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

from harness.environment import write_report
from harness.machine import measure_limits
from harness.model_size import StoredBytes, read_stored_bytes
from harness.spawn import Server, spawned_process
from serving.many_streams import bodies, stream_all

_ROOM_BYTES = 3 * 2**29  # beside the checkpoint and the cache: interpreter, prompt
_CACHE_BYTES = 2**29
_START_LIMIT_S = 900.0
_KV_BYTES = re.compile(r'^moe_serve:planned_memory_bytes\{.*purpose="kv_pages".*\} (\S+)$', re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The figures of a server."""

    stored_bytes: int
    read_gb_s: float  # just before the server started
    ready_s: float
    num_prompt: int  # tokens
    prompt_s: float  # of the first answer's only token
    decode_tok_s: float  # one stream
    step_bytes: float  # of one row
    peak_bytes: int  # resident, with the pages of files and libraries
    private_bytes: int  # resident at the end, of this process alone
    kv_bytes: float

    @property
    def byte_share(self) -> float:
        """The bytes per second that decoding reads, over the bandwidth."""
        return self.step_bytes * self.decode_tok_s / 1e9 / self.read_gb_s

    @property
    def peak_share(self) -> float:
        return (self.peak_bytes - self.kv_bytes) / self.stored_bytes


def main() -> int:
    arguments = _parser().parse_args()
    stored, free = read_stored_bytes(arguments.model), psutil.virtual_memory().available
    needed = stored.total + _CACHE_BYTES + _ROOM_BYTES
    if free < needed:
        sys.stderr.write(
            f"{arguments.model} needs {needed / 1e9:.1f} GB of memory, but {free / 1e9:.1f} GB are "
            "available: end other programs, or use a smaller checkpoint.\n"
        )
        return 2
    read_gb_s = measure_limits(arguments.threads).read_gb_s
    longest = max(1024, arguments.prompt + arguments.output + 1)
    options = f"{arguments.model} --num-threads {arguments.threads} --max-model-len {longest}"
    settings = {
        "MOE_SERVE_MODEL_LOW_BIT_PRODUCTS": arguments.products,
        "MOE_SERVE_CACHE_MEMORY_BYTES": str(_CACHE_BYTES),
    }
    with spawned_process(options, _START_LIMIT_S, settings) as server:
        served = measure(server, stored, read_gb_s, arguments)
    print_served(served)
    write_report(arguments.json, asdict(served))
    return 0


def measure(
    server: Server, stored: StoredBytes, read_gb_s: float, arguments: argparse.Namespace
) -> Served:
    """Asks a server for answers of one token and of several, to the same prompt."""
    config = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))
    seconds = []
    for num_tokens in (1, 1, 1 + arguments.output):
        asked = bodies(1, arguments.prompt, num_tokens, int(config["vocab_size"]), 0)
        streamed = asyncio.run(stream_all(server.url, asked))
        if streamed.errors or streamed.num_tokens != num_tokens:
            raise SystemExit(f"{streamed.num_tokens} of {num_tokens} tokens: {streamed.errors}")
        seconds.append(streamed.seconds)
    metrics = httpx.get(f"{server.url}/metrics", timeout=60, trust_env=False).text
    found = _KV_BYTES.search(metrics)
    status = Path(f"/proc/{server.pid}/status").read_text("ascii")
    return Served(
        stored_bytes=stored.total,
        read_gb_s=read_gb_s,
        ready_s=server.ready_s,
        num_prompt=arguments.prompt,
        prompt_s=seconds[0],
        decode_tok_s=arguments.output / (seconds[2] - seconds[1]),
        step_bytes=stored.of_step(1),
        peak_bytes=_status_bytes(status, "VmHWM"),
        private_bytes=_status_bytes(status, "RssAnon"),
        kv_bytes=float(found[1]) if found else 0.0,
    )


def print_served(served: Served) -> None:
    gib = 2**30
    sys.stdout.write(
        f"checkpoint {served.stored_bytes / 1e9:.2f} GB, ready after {served.ready_s:.0f} s, first "
        f"answer after {served.prompt_s:.2f} s: prompt of {served.num_prompt} tokens at "
        f"{served.num_prompt / served.prompt_s:.1f} tok/s\n"
        f"one stream {served.decode_tok_s:.2f} tok/s, {served.step_bytes / 1e9:.2f} GB a step: "
        f"{served.byte_share:.0%} of {served.read_gb_s:.1f} GB/s\n"
        f"peak {served.peak_bytes / gib:.2f} GiB with {served.kv_bytes / gib:.2f} GiB of cache: "
        f"{served.peak_share:.2f} of the checkpoint without it; {served.private_bytes / gib:.2f} "
        "GiB are the process's own\n"
    )


def _status_bytes(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.M)
    assert found is not None, f"/proc/PID/status has no {name}"
    return int(found[1]) * 1024


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="checkpoint folder in Hugging Face layout")
    parser.add_argument("--products", choices=("exact", "int8"), default="exact")
    parser.add_argument("--prompt", type=int, default=64, help="tokens, default %(default)s")
    parser.add_argument("--output", type=int, default=32, help="tokens, default %(default)s")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    return parser
