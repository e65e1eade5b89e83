"""Compares the roofline of the simulator with published throughputs and latencies.

    python benchmarks/run.py published_rows             # with the shares in configs/devices
    python benchmarks/run.py published_rows --fit       # fit six shares, leaving out each device

A row is one steady step, not a run: `decode` is a step of `rows` sequences on each device, in
tokens per second of a node of 8 devices; `prefill` is a step that reads whole prompts; `tpot` is
the mean time of a step in milliseconds, with the prompts that are
read beside answers. In steps that read prompts, a token goes once to each node and
on from there; in decode it goes to every device by itself. So do the engines of these rows, with
DeepEP's normal and low-latency modes. They read prompts with latent attention expanded, too.

`--fit` fits the six shares to the rows of all types of devices but one, predicts the rows of that
one, and does so for each type. The last fit, to all rows, is what the files in configs/devices
have. The bound is the prediction with all shares at 1 and without launches.

The gain of balanced experts is predicted for invented loads with the statistics of DeepSeek-V3
(placement/inputs.py). The plan is made for the loads that it serves.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy.optimize import minimize

from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, step_time
from moe_serve.simulate.catalogue import find_device, find_model
from moe_serve.simulate.costs.device import DeviceType, Efficiency, read_device
from moe_serve.simulate.costs.model_shape import ModelShape, read_model_shape
from moe_serve.simulate.costs.roofline import RooflineCosts
from moe_serve.simulate.costs.routing_law import EvenRouting, RecordedRouting, RoutingLaw
from moe_serve.simulate.layout import Layout
from placement.inputs import workloads

NODE = 8  # devices
MEAN_LENGTH = 0.9  # of the longest: InferenceX draws lengths evenly from 0.8 to 1 of the named ones
BOUND = Efficiency(gemm=1.0, attention=1.0, memory=1.0, link=1.0, launch_us=0.0, host_ms=0.0)
_SHARES = ("gemm", "attention", "memory", "link")
_TIMES = ("launch_us", "host_ms")
_WIDTH = 0.5  # of the first simplex: of the logarithms that are fitted
_PULL = 0.02  # of the starting values, so that shares no row depends on stay where they are


Kind = Literal["decode", "prefill", "tpot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One published figure. `rows`: sequences of a device that decode, or prompt tokens of a device
    in a prefill step; `context`: tokens of a sequence in the middle of its answer, or of a prompt.
    """

    source: str
    model: str
    device: str
    devices: int
    shards: int
    kind: Kind
    rows: int
    context: int
    published: float
    micro_batches: int = 1
    lengths: tuple[int, int] | None = None  # tokens of a prompt and its answer, of a run

    @property
    def name(self) -> str:
        return f"{self.source}, {self.devices} x {self.device}"


def _row(
    source: str,
    model: str,
    device: str,
    devices: int,
    shards: int,
    kind: Kind,
    rows: int,
    context: int,
    published: float,
    micro_batches: int = 1,
    lengths: tuple[int, int] | None = None,
) -> PublishedRow:
    return PublishedRow(
        source=source, model=model, device=device, devices=devices, shards=shards, kind=kind,
        rows=rows, context=context, published=published, micro_batches=micro_batches,
        lengths=lengths,
    )  # fmt: skip


def _run(
    source: str,
    model: str,
    device: str,
    devices: int,
    requests: int,
    lengths: tuple[int, int],
    published: float,
    mean_length: float = MEAN_LENGTH,
) -> PublishedRow:
    """Returns the row of a closed loop on one cell whose devices share each request. `lengths`: the
    longest prompt and answer; `mean_length`: of these, in the mean."""
    prompt, output = (round(mean_length * each) for each in lengths)
    return _row(
        source, model, device, devices, devices, "tpot", requests, prompt + output // 2, published,
        1, (prompt, output),
    )  # fmt: skip


V3, M2, QWEN, K2 = "deepseek-v3", "minimax-m2", "qwen3-235b", "kimi-k2"
ROWS = (
    _row("DeepSeek, prefill EP32 4K", V3, "h800", 32, 1, "prefill", 16384, 4096, 62713, 2),
    _row("DeepSeek, decode EP128 4K", V3, "h800", 128, 1, "decode", 128, 4096, 18598, 2),
    _row("LMSYS, prefill EP32 1K", V3, "h100", 32, 1, "prefill", 16384, 1024, 57674, 2),
    _row("LMSYS, prefill EP32 2K", V3, "h100", 32, 1, "prefill", 16384, 2048, 54543, 2),
    _row("LMSYS, prefill EP32 4K", V3, "h100", 32, 1, "prefill", 16384, 4096, 50302, 2),
    _row("LMSYS, decode EP72 2K", V3, "h100", 72, 1, "decode", 256, 2050, 22282, 2),
    _row("LMSYS, K2 prefill EP32 2K", K2, "h200", 32, 1, "prefill", 16384, 2000, 56000, 2),
    _row("LMSYS, K2 decode EP96 2K", K2, "h200", 96, 1, "decode", 480, 2050, 24000, 2),
    _row("LMSYS, prefill 4 ranks 2K", V3, "gb200", 4, 1, "prefill", 16384, 2048, 8 * 18471, 1),
    _row("LMSYS, decode 48 ranks 2K", V3, "gb200", 48, 1, "decode", 1408, 2050, 8 * 9087, 1),
    _run("R1, TRT-LLM TP8, 1K/1K, 16", V3, "h200", 8, 16, (1024, 1024), 20.4),
    _run("R1, SGLang TP8, 1K/1K, 16", V3, "h200", 8, 16, (1024, 1024), 16.6),
    _run("R1, TRT-LLM EP8, 1K/8K, 16", V3, "h200", 8, 16, (1024, 8192), 11.4),
    _run("R1, SGLang TP8, 1K/1K, 16", V3, "b200", 8, 16, (1024, 1024), 11.7),
    _run("R1, TRT-LLM TP8, 8K/1K, 32", V3, "b200", 8, 32, (8192, 1024), 15.9),
    _run("Qwen3, TRT-LLM TP4, 1K/128, 32", QWEN, "h100", 4, 32, (1024, 128), 31.2, 1.0),
    _run("Qwen3, vLLM TP2, 1K/100, 16", QWEN, "h200", 2, 16, (1000, 100), 52.2, 1.0),
    _run("M2.5, vLLM TP4, 1K/1K, 16", M2, "h100", 4, 16, (1024, 1024), 15.5),
    _run("M2.5, vLLM TP8, 1K/1K, 32", M2, "h200", 8, 32, (1024, 1024), 13.7),
)


# The throughput of two micro-batches relative to that of one: no row is fitted to these.
HALVES = (
    _row("LMSYS, decode EP72 2K", V3, "h100", 72, 1, "decode", 256, 2050, 1.255),
    _row("LMSYS, decode EP72 2K", V3, "h100", 72, 1, "decode", 32, 2050, 0.73),
    _row("LMSYS, prefill EP32 4K", V3, "h100", 32, 1, "prefill", 8192, 4096, 1.31),
)


REDUNDANT = 32  # further copies of experts in each layer
NUM_SCENARIOS = 12  # invented loads, half of them of prompts
# The throughput with experts placed by their loads relative to that without: no row is fitted.
BALANCED = (
    _row("LMSYS, prefill EP32 4K", V3, "h100", 32, 1, "prefill", 16384, 4096, 1.49, 2),
    _row("LMSYS, decode EP72 2K", V3, "h100", 72, 1, "decode", 256, 2050, 2.54, 2),
)


@lru_cache
def shape_of(model: str) -> ModelShape:
    return read_model_shape(find_model(model), "fp8")


@lru_cache
def device_of(name: str) -> DeviceType:
    return read_device(find_device(name))


def predicted(
    row: PublishedRow,
    efficiency: Efficiency | None = None,
    routing: RoutingLaw | None = None,
    num_redundant: int | None = None,
) -> float:
    """Returns the figure of a row in its unit, from the step that it describes. `routing` None:
    all experts are equally popular."""
    layout = Layout.parse("colocated", row.devices, row.shards)
    layout = replace(layout, num_redundant=num_redundant)
    model, device = shape_of(row.model), device_of(row.device)
    if efficiency is not None:
        device = replace(device, efficiency=efficiency)
    routing = routing or EvenRouting(model.num_experts, model.top_k)
    costs = RooflineCosts(
        model, device, layout, routing, forwards=row.kind == "prefill", expands_latents=True
    )
    ranks = Ranks(num_attention=layout.num_attention, num_experts=layout.num_holders)
    if row.kind == "prefill":
        prompts = row.rows // row.context
        load = BatchLoad.of_parts([0] * prompts, [row.context] * prompts)
    else:
        load = BatchLoad.decode(row.rows, row.context)
    seconds = step_time(costs, [load] * layout.num_attention, row.micro_batches, ranks)
    if row.lengths is not None:
        seconds += _prompts_seconds(costs, row, load, ranks)
    return 1e3 * seconds if row.kind == "tpot" else NODE * load.num_rows / seconds


def _prompts_seconds(
    costs: RooflineCosts, row: PublishedRow, decode: BatchLoad, ranks: Ranks
) -> float:
    """Returns what the prompts of the other requests add to the mean step of a closed loop: each
    request reads one in as many steps as its answer has tokens."""
    assert row.lengths is not None, "a run has lengths"
    prompt, output = row.lengths
    both = BatchLoad.together([decode, BatchLoad.of_parts([0], [prompt])])
    longer_s = step_time(costs, [both], 1, ranks) - step_time(costs, [decode], 1, ranks)
    return (row.rows - 1) / output * longer_s


def fit_shares(rows: Sequence[PublishedRow]) -> Efficiency:
    """Fits the six shares to the smallest sum of |log error|, from the defaults. The first simplex
    is wide, as the sum has kinks at which a small one stops."""
    start = np.array([*(_logit(getattr(Efficiency(), name)) for name in _SHARES),
                      *(math.log(getattr(Efficiency(), name)) for name in _TIMES)])  # fmt: skip

    def loss(x: np.ndarray) -> float:
        errors = [abs(math.log(predicted(row, _efficiency(x)) / row.published)) for row in rows]
        return sum(errors) + _PULL * float(np.square(x - start).sum())

    best = start
    for _ in range(2):
        simplex = np.vstack([best, best + _WIDTH * np.eye(len(best))])
        options = {"maxfev": 600, "xatol": 1e-3, "fatol": 1e-4, "adaptive": True}
        best = minimize(
            loss, best, method="Nelder-Mead", options={**options, "initial_simplex": simplex}
        ).x
    return _efficiency(best)


def _efficiency(x: np.ndarray) -> Efficiency:
    shares = {name: 1 / (1 + math.exp(-v)) for name, v in zip(_SHARES, x[:4], strict=True)}
    times = {name: math.exp(v) for name, v in zip(_TIMES, x[4:], strict=True)}
    return Efficiency(**shares, **times)


def _logit(share: float) -> float:
    return math.log(share / (1 - share))


def held_out() -> dict[PublishedRow, float]:
    """Predicts the rows of each type of device with shares fitted to the other types."""
    found: dict[PublishedRow, float] = {}
    for device in dict.fromkeys(row.device for row in ROWS):
        shares = fit_shares([row for row in ROWS if row.device != device])
        print(f"without {device}: {_shown(shares)}", flush=True)
        found |= {row: predicted(row, shares) for row in ROWS if row.device == device}
    return found


def _shown(shares: Efficiency) -> str:
    return ", ".join(f"{name} {getattr(shares, name):.2f}" for name in (*_SHARES, *_TIMES))


def _table(values: dict[PublishedRow, float]) -> list[float]:
    print(f"{'row':44}{'kind':>8}{'published':>11}{'predicted':>11}{'error':>7}{'bound':>11}")
    errors = []
    for row, value in values.items():
        errors.append(abs(value / row.published - 1))
        print(
            f"{row.name:44}{row.kind:>8}{row.published:>11.1f}{value:>11.1f}"
            f"{value / row.published - 1:>+7.0%}{predicted(row, BOUND):>11.1f}"
        )
    print(f"median error {statistics.median(errors):.0%}, largest {max(errors):.0%}")
    return errors


def show_halves() -> None:
    """Prints the published and the predicted gain of two micro-batches over one."""
    for row in HALVES:
        one, two = (predicted(replace(row, micro_batches=count)) for count in (1, 2))
        print(
            f"two micro-batches, {row.name}, {row.rows} rows: {row.published:g} times the "
            f"throughput of one published, {two / one:.2f} predicted"
        )


def show_balance() -> None:
    """Prints the published and the predicted gain of experts that are placed by their loads."""
    for row in BALANCED:
        model = shape_of(row.model)
        num_sparse = sum(layer.num_layers for layer in model.layers if layer.is_sparse)
        loads = workloads(NUM_SCENARIOS, num_sparse, model.num_experts)
        of_kind = [i for i, name in enumerate(loads.scenarios) if name.startswith(row.kind)]
        laws = [RecordedRouting(model.top_k * loads.shares_SLE()[i]) for i in of_kind]
        gains = [
            predicted(row, None, law, REDUNDANT) / predicted(row, None, law, None) for law in laws
        ]
        gain = statistics.mean(gains)
        uneven = [statistics.mean([law.imbalance(row.devices, num) for law in laws])
                  for num in (None, REDUNDANT)]  # fmt: skip
        print(
            f"balanced experts, {row.name}: {row.published:g} times the throughput published, "
            f"{gain:.2f} predicted ({gain / row.published - 1:+.0%}; {min(gains):.2f} to "
            f"{max(gains):.2f}); the busiest device has {uneven[0]:.2f} times the mean, with "
            f"{REDUNDANT} copies {uneven[1]:.2f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit, leaving out each type of device")
    if parser.parse_args().fit:
        _table(held_out())
        print(f"all rows: {_shown(fit_shares(ROWS))}")
    else:
        _table({row: predicted(row) for row in ROWS})
        show_halves()
        show_balance()
        show_day()
    return 0


DAY_IN, DAY_OUT, DAY_CACHED, DAY_NODES = 608e9, 168e9, 0.563, 226.75
DAY_IN_RATE, DAY_OUT_RATE = 73_700.0, 14_800.0  # tokens/s of a node in the mean of the day


def show_day() -> None:
    """Prints the nodes that DeepSeek's published day needs, by its own rates and by these costs.

    The published rates are means of a day, the predicted ones those of full steps, so the second
    number is what a service without idle hours would need.
    """
    nodes = DAY_IN / 86400 / DAY_IN_RATE + DAY_OUT / 86400 / DAY_OUT_RATE
    prefill, decode = predicted(ROWS[0]), predicted(ROWS[1])
    full = DAY_IN * (1 - DAY_CACHED) / 86400 / prefill + DAY_OUT / 86400 / decode
    print(
        f"DeepSeek's day: {DAY_NODES} nodes published; {nodes:.1f} by its rates "
        f"({nodes / DAY_NODES - 1:+.1%}); {full:.1f} if nodes always ran full steps as predicted "
        f"({full / DAY_NODES:.0%} of the published)"
    )
