"""A workload at its capacity: a part of a trace, tiers with targets, and a simulated server.

The server is one H200 with Qwen3-30B-A3B in fp8, costed by the roofline of `configs/`. Answers of
most traces are cut to a quarter, and the server has 32 seats where a server of full answers would
have 128: the same queue at a quarter of the simulator's time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from moe_serve.bench.capacity import at_load, find_capacity
from moe_serve.bench.simulated_run import SimulatedRun, run_simulation
from moe_serve.bench.workload.tier_mix import TierMix
from moe_serve.bench.workload.trace_rows import Trace, TraceCut, TraceRow, read_trace
from moe_serve.bench.workload.workload import Workload
from moe_serve.config.sections import SchedulerConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.simulate.catalogue import find_device, find_model
from moe_serve.simulate.costs.device import read_device
from moe_serve.simulate.costs.model_shape import read_model_shape
from moe_serve.simulate.layout import Layout
from moe_serve.simulate.simulation import CellSettings, CostedModel, on_device

SEATS, BUDGET = 32, 1024
TARGETS = {"interactive": 5.0, "standard": 25.0, "flex": 300.0}  # times the unloaded TTFT
WEIGHTS = {"interactive": 4.0, "standard": 2.0, "flex": 1.0}
SHARES = {"interactive": 0.5, "standard": 0.3, "flex": 0.2}
PRIORITIES = {"interactive": 0, "standard": 2, "flex": 12}
TPOT_TIMES = 3.0  # target of the interactive tier, times the TPOT of a request alone


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpec:
    """A trace's file, and how much of it a run replays."""

    file: str
    rows: int
    scale_output: float = 0.25
    max_prompt: int | None = None
    page_size: int = 128

    def whole(self, folder: Path) -> Trace:
        cut = TraceCut(scale_output=self.scale_output, max_prompt=self.max_prompt)
        return cut.of(read_trace(folder / self.file))


TRACES: Mapping[str, TraceSpec] = {
    "conv": TraceSpec(file="azure2023/AzureLLMInferenceTrace_conv.csv.xz", rows=1500),
    "vtc": TraceSpec(file="vtc_arena_27clients/requests.csv.xz", rows=1500),
    "code": TraceSpec(
        file="azure2023/AzureLLMInferenceTrace_code.csv.xz", rows=2000, scale_output=1.0
    ),
    "mooncake": TraceSpec(
        file="mooncake/conversation_trace.jsonl.xz", rows=1000, max_prompt=32_000, page_size=512
    ),
}
CHOSEN_ON, JUDGED_ON = ("conv", "vtc"), ("code", "mooncake")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A part of a trace on the server. `unloaded_s`: TTFT of its P95 prompt alone; `capacity`:
    requests per second in order of arrival."""

    name: str
    run: SimulatedRun
    unloaded_s: float
    unloaded_tpot_s: float
    capacity: float

    def tiers(self, *, has_tpot: bool = False, has_priorities: bool = False) -> TierMix:
        tiers = [
            TierConfig(
                name=name,
                weight=WEIGHTS[name],
                ttft_s=times * self.unloaded_s,
                tpot_s=(
                    TPOT_TIMES * self.unloaded_tpot_s
                    if has_tpot and name == "interactive"
                    else None
                ),
            )
            for name, times in TARGETS.items()
        ]
        return TierMix.of(tiers, SHARES, PRIORITIES if has_priorities else None)

    @property
    def target_s(self) -> float:
        """The TTFT target of the top tier."""
        return TARGETS["interactive"] * self.unloaded_s

    def at(
        self, load: float, mix: TierMix, scheduler: SchedulerConfig, *, is_strict: bool
    ) -> SimulatedRun:
        """Returns the run at a share of the capacity."""
        run = at_load(self.run, load, self.capacity)
        return replace(
            run,
            workload=replace(run.workload, tiers=mix),
            settings=replace(run.settings, scheduler=scheduler),
            is_strict=is_strict,
        )


@lru_cache(1)
def model() -> CostedModel:
    shape = read_model_shape(find_model("qwen3-30b"), "fp8")
    return on_device(shape, read_device(find_device("h200")), Layout.parse("colocated", 1), None)


def make_setting(name: str, trace: Trace, spec: TraceSpec, seed: int, rows: int) -> Setting:
    """Takes the seed's part of a trace: the seeds are spread over the whole of it. The seed also
    draws the tiers."""
    spare = max(0, len(trace.rows) - rows)
    first = spare * seed // 3
    part = trace.rows[first : first + rows]
    start = part[0].at_s
    cut = Trace(rows=tuple(replace(row, at_s=row.at_s - start) for row in part))
    run = _run(spec, cut, seed)
    alone_s, tpot_s = _alone(run, part)
    return Setting(
        name=name,
        run=run,
        unloaded_s=alone_s,
        unloaded_tpot_s=tpot_s,
        capacity=find_capacity(run),
    )


def _run(spec: TraceSpec, trace: Trace, seed: int) -> SimulatedRun:
    longest = max(row.prompt_tokens + row.output_tokens for row in trace.rows)
    settings = CellSettings(
        layout=Layout.parse("colocated", 1),
        scheduler=SchedulerConfig(
            max_num_seqs=SEATS, max_batched_tokens=BUDGET, max_queued_requests=2**20
        ),
        page_size=spec.page_size,
        max_model_len=longest,
    )
    return SimulatedRun(model=model(), settings=settings, workload=Workload(seed=seed, trace=trace))


def _alone(run: SimulatedRun, rows: tuple[TraceRow, ...]) -> tuple[float, float]:
    """Returns the TTFT and TPOT of a request with the P95 prompt on an idle server."""
    lengths = sorted(row.prompt_tokens for row in rows)
    row = TraceRow(at_s=0.0, prompt_tokens=lengths[int(0.95 * len(lengths))], output_tokens=16)
    settings = replace(run.settings, max_model_len=row.prompt_tokens + row.output_tokens)
    alone = replace(run, workload=Workload(seed=0, trace=Trace(rows=(row,))), settings=settings)
    summary = run_simulation(alone).summary
    assert summary.ttft_ms is not None and summary.tpot_ms is not None, "it is answered"
    return summary.ttft_ms.p50 / 1e3, summary.tpot_ms.p50 / 1e3
