"""Checks cells with roles against published figures: ratios, a day, and three measured runs.

    python benchmarks/run.py roles
    python benchmarks/run.py roles --only formulas     # without the simulations

The ratio of prefill to decode cells follows from the tokens of a load and the rates of a cell. The
runs are closed loops of InferenceX, with the layouts that it published; their servers are
TensorRT-LLM and SGLang, and nothing was fitted to these rows. `8D tp8`: one attention rank on eight
devices; `8D`: a rank on each. The one with 1 152 at once takes minutes: `--only all`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.simulated_run import SimulatedRun, run_simulation
from moe_serve.bench.workload.workload import Lengths, Workload
from moe_serve.cluster.autoscale.plan_table import CellRates, cells_ratio
from moe_serve.config.cells import CellsConfig, parse_cells
from moe_serve.config.sections import SchedulerConfig
from moe_serve.simulate.catalogue import find_device, find_model
from moe_serve.simulate.coordinated.coordinated_cell import costed_plans
from moe_serve.simulate.coordinated.coordinated_run import CellsSetup, PageSpeed
from moe_serve.simulate.costs.device import read_device
from moe_serve.simulate.costs.model_shape import read_model_shape
from moe_serve.simulate.layout import Layout
from moe_serve.simulate.simulation import CellSettings, limits_of, on_device

# DeepSeek's published profile of a node of 8 H800: tokens/s that it reads, and that it generates.
PREFILL = CellRates(prompt_tok_s=62_713, output_tok_s=None)
DECODE = CellRates(prompt_tok_s=None, output_tok_s=18_598)
# Mean tokens of a prompt and of an answer, and the ratio worked out by hand from these rates.
LOADS = {
    "Azure, conversations": (1155.0, 211.0, 1.6),
    "Azure, code": (2048.0, 28.0, 22.0),
    "Mooncake": (12_035.0, 343.0, 10.0),
    "Mooncake, 37% of the prompts cached": (0.63 * 12_035, 343.0, 6.5),
    "512 in, 256 out": (512.0, 256.0, 0.6),
}
_MANY = 1000  # requests at once
_SHORTEST = 0.8  # of the longest prompt or answer: lengths are even from there
DAY_IN, DAY_OUT, DAY_NODES = 608e9, 168e9, 226.75  # tokens of DeepSeek's day
DAY_RATES = 73_700.0, 14_800.0  # tokens/s of a node in the mean of that day


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A published run. `prompt`, `output`: the longest; `ttft_ms`, `tpot_ms`: means."""

    name: str
    device: str
    cells: str
    prompt: int
    output: int
    concurrency: int
    requests: int  # that are simulated
    ttft_ms: float
    tpot_ms: float


RUNS = (
    MeasuredRun(name="SGLang, 1P + 1D, 8K/1K, 128 at once", device="h200",
                cells="1x(8D tp8 prefill) 1x(8D decode)", prompt=8192, output=1024,
                concurrency=128, requests=256, ttft_ms=3644, tpot_ms=40.6),
    MeasuredRun(name="TRT-LLM, 1P + 9D, 1K/1K, 1152 at once", device="h200",
                cells="1x(8D prefill) 9x(8D decode)", prompt=1024, output=1024,
                concurrency=1152, requests=2304, ttft_ms=3288, tpot_ms=34.8),
    MeasuredRun(name="TRT-LLM, 1P + 3D of 16, 1K/1K, 30 at once", device="h100",
                cells="1x(16D prefill) 3x(16D tp16 decode)", prompt=1024, output=1024,
                concurrency=30, requests=60, ttft_ms=5052, tpot_ms=19.9),
)  # fmt: skip


def show_formulas() -> None:
    """Prints the ratios and the day."""
    for name, (prompt, output, by_hand) in LOADS.items():
        ratio = cells_ratio(prompt, output, PREFILL, DECODE)
        print(f"{name:38} {ratio:5.1f} prefill cells for a decode cell (by hand {by_hand:g})")
    prefill = CellRates(prompt_tok_s=DAY_RATES[0], output_tok_s=None)
    decode = CellRates(prompt_tok_s=None, output_tok_s=DAY_RATES[1])
    nodes = (prefill.seconds(DAY_IN, 0) + decode.seconds(0, DAY_OUT)) / 86_400
    change = nodes / DAY_NODES - 1
    print(f"DeepSeek's day: {nodes:.1f} nodes, {DAY_NODES} published ({change:+.1%})")


def _settings(layout: Layout, run: MeasuredRun) -> CellSettings:
    return CellSettings(
        layout=layout,
        scheduler=SchedulerConfig(max_num_seqs=512, max_batched_tokens=8192),
        page_size=128,
        max_model_len=run.prompt + run.output + 1,
    )


def show_run(run: MeasuredRun) -> None:
    """Simulates a run, and prints its means beside the measured ones."""
    began = time.process_time()
    shape = read_model_shape(find_model("deepseek-v3"), "fp8")
    device = read_device(find_device(run.device))
    shapes = parse_cells(run.cells, is_simulated=True)
    plans = costed_plans(
        shapes,
        lambda layout: on_device(shape, device, layout, None, expands_latents=True),
        lambda model, layout: limits_of(model, _settings(layout, run)),
    )
    setup = CellsSetup(
        name=run.cells,
        plans=tuple(plans),
        config=CellsConfig(layout=run.cells, hand_over="always"),
        speed=PageSpeed.of_device(device, sum(plan.layout.num_devices for plan in plans)),
    )
    workload = Workload(
        seed=0,
        concurrency=run.concurrency,
        prompt_tokens=Lengths(low=int(_SHORTEST * run.prompt), high=run.prompt),
        output_tokens=Lengths(low=int(_SHORTEST * run.output), high=run.output),
        num_requests=run.requests,
    )
    first = plans[0]
    report = run_simulation(
        SimulatedRun(
            model=first.model,
            settings=_settings(first.layout, run),
            workload=workload,
            cells=setup,
        )
    )
    tpot_ms = report.summary.tpot_ms
    assert tpot_ms is not None, "all were answered"
    tpot, ttft = tpot_ms.mean, _mean_ttft_ms(report.records, run)
    print(
        f"{run.name:44} TTFT {ttft:7.0f} ms, {run.ttft_ms:.0f} measured "
        f"({ttft / run.ttft_ms - 1:+.0%}); TPOT {tpot:5.1f} ms, {run.tpot_ms} measured "
        f"({tpot / run.tpot_ms - 1:+.0%}); {time.process_time() - began:.0f} s of a core",
        flush=True,
    )


def _mean_ttft_ms(records: Sequence[RequestRecord], run: MeasuredRun) -> float:
    """Returns the mean as the published runs take it: of ten waves, the first of which comes at
    once. All later ones are like those that were simulated."""
    first = [r.ttft_s or 0.0 for r in records if r.index < run.concurrency]
    later = [r.ttft_s or 0.0 for r in records if r.index >= run.concurrency]
    means = statistics.mean(first), statistics.mean(later or first)
    print(f"    first wave {1e3 * means[0]:.0f} ms, later ones {1e3 * means[1]:.0f} ms")
    return 1e3 * (0.1 * means[0] + 0.9 * means[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("formulas", "runs", "all"))
    only = parser.parse_args().only
    if only != "runs":
        show_formulas()
    for run in RUNS:
        if only == "all" or (only != "formulas" and run.concurrency < _MANY):
            show_run(run)
    return 0
