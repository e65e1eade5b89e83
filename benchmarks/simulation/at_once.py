"""Simulates 1 000 and 10 000 requests at once, and holds a published table of them against itself.

    python benchmarks/run.py at_once
    python benchmarks/run.py at_once --requests 1000

The table (a dense model of 72 billion parameters on "8xH100", 512 + 256 tokens in the median) gives
an E2E P50 of 2.1 s for 1 000 requests at once and 8.4 s for 10 000, and 13 500 tokens/s: numbers
that contradict each other. Its ratios of baseline to own system are a shape to discuss, no aim.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from moe_serve.bench.simulated_run import SimulatedRun, run_simulation
from moe_serve.bench.workload.workload import Lengths, Workload
from moe_serve.config.sections import SchedulerConfig
from moe_serve.simulate.catalogue import find_device, find_model
from moe_serve.simulate.costs.device import read_device
from moe_serve.simulate.costs.model_shape import read_model_shape
from moe_serve.simulate.layout import Layout
from moe_serve.simulate.simulation import CellSettings, on_device

ANSWER, PROMPT = 256, 512  # tokens
TABLE_RATE = 13_500.0  # tokens/s of the table's own throughput row, on 8 devices
NODE = 8


@dataclass(frozen=True, slots=True)
class PublishedLatency:
    """A row of the table: requests at once, E2E P50 in seconds, and the ratios of the baseline's
    E2E P50 and P99 to the system's."""

    requests: int
    e2e_s: float
    ratio_p50: float
    ratio_p99: float


ROWS = (
    PublishedLatency(1_000, 2.1, 2.0, 2.3),
    PublishedLatency(10_000, 8.4, 4.6, 4.7),
)


def contradictions() -> Iterator[str]:
    """State what the table's latencies mean for its throughput."""
    for row in ROWS:
        rate = row.requests * ANSWER / row.e2e_s
        yield (
            f"{row.requests} requests at once with {ANSWER} tokens in {row.e2e_s} s are "
            f"{rate:,.0f} tokens/s, {rate / TABLE_RATE:.1f} times the table's own "
            f"{TABLE_RATE:,.0f}: possible on {rate / TABLE_RATE:.1f} such nodes, not on one. "
            f"Baseline / system: P50 {row.ratio_p50:g}, P99 {row.ratio_p99:g}"
        )


def simulated(requests: int, model: str) -> str:
    """Simulates the requests on one node, all at once."""
    layout = Layout.parse("colocated", NODE, NODE)
    costed = on_device(
        read_model_shape(find_model(model), "fp8"), read_device(find_device("h100")), layout, None
    )
    settings = CellSettings(
        layout=layout,
        scheduler=SchedulerConfig(max_num_seqs=512, max_batched_tokens=8192),
        page_size=128,
        max_model_len=PROMPT + ANSWER + 1,
    )
    workload = Workload(
        seed=0,
        concurrency=requests,
        prompt_tokens=Lengths(low=PROMPT, high=PROMPT),
        output_tokens=Lengths(low=ANSWER, high=ANSWER),
        num_requests=requests,
    )
    summary = run_simulation(
        SimulatedRun(model=costed, settings=settings, workload=workload)
    ).summary
    assert summary.e2e_ms is not None, "all requests are answered"
    p50, p99, rate = summary.e2e_ms.p50 / 1e3, summary.e2e_ms.p99 / 1e3, summary.output_tok_s
    wanted = next((row for row in ROWS if row.requests == requests), None)
    text = (
        f"{requests} at once on {NODE} x h100 (simulated, {costed.size.name}): "
        f"E2E P50 {p50:.1f} s, P99 {p99:.1f} s, {rate:,.0f} tokens/s"
    )
    if wanted is not None:
        nodes = requests * ANSWER / wanted.e2e_s / rate
        text += f"; {wanted.e2e_s} s would take {nodes:.1f} nodes"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-235b")
    parser.add_argument("--requests", type=int, nargs="+", default=[row.requests for row in ROWS])
    arguments = parser.parse_args()
    for line in contradictions():
        print(line)
    for requests in arguments.requests:
        print(simulated(requests, arguments.model), flush=True)
    return 0
