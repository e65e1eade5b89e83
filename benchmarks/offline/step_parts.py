"""Measures what a decode step of one stream spends in its layers, its head, and Python.

    python benchmarks/run.py step_parts build/random-1b
    python benchmarks/run.py step_parts build/random-1b-int4 --products int8

The layers and the head are one native call, which notes when its layers begin and end. What is left
of the time between two calls is Python: the scheduler, the plan, the sampler, the outputs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.machine import measure_limits
from harness.model_size import read_stored_bytes
from moe_kernels.interface.layer_stack import StackResult, StackRows
from moe_serve import LLM, SamplingParams
from moe_serve.model.step_plan import MicroBatch
from moe_serve.pipeline.stacked_layers import StackedLayers
from moe_serve.pipeline.timeline.stage_log import StageLog

_PROMPT = 128


@dataclass(frozen=True, slots=True)
class Step:
    """Times of one decode step in ms; `python`: until the next call."""

    layers: float
    head: float
    python: float

    @property
    def outside(self) -> float:
        return self.head + self.python


def main() -> int:
    arguments = _parser().parse_args()
    stored = read_stored_bytes(arguments.model)
    calls = _noted_calls()
    with LLM(
        model=str(arguments.model),
        max_model_len=_PROMPT + arguments.steps + 1,
        max_num_seqs=1,
        num_threads=arguments.threads,
        prefix_cache=False,
        low_bit_products=arguments.products,
    ) as llm:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=arguments.steps)
        prompt = np.random.default_rng(0).integers(16, 4000, _PROMPT).tolist()
        for _ in range(arguments.rounds):
            read_gb_s = measure_limits(arguments.threads).read_gb_s
            calls.clear()
            llm.generate([prompt], params, use_progress_bar=False)
            steps = _steps(calls)
            num_bytes = stored.of_step(1) - stored.head
            speed = num_bytes / statistics.median(step.layers for step in steps) / 1e6
            best = num_bytes / min(step.layers for step in steps) / 1e6
            sys.stdout.write(
                f"reads {read_gb_s:.1f} GB/s; layers {speed:.1f} GB/s ({speed / read_gb_s:.0%}), "
                f"at best {best:.1f} ({best / read_gb_s:.0%})\n"
            )
            for name in ("layers", "head", "python", "outside"):
                _print_line(name, sorted(getattr(step, name) for step in steps))
    return 0


def _noted_calls() -> list[tuple[int, int, StackResult]]:
    """Returns a list that gets the begin, the end and the result of every call from now on."""
    calls: list[tuple[int, int, StackResult]] = []

    def run(
        self: StackedLayers, batch: MicroBatch, log: StageLog, *, has_choices: bool
    ) -> StackResult:
        rows = StackRows()
        for piece in batch.slices:
            rows.add(piece.start, piece.token_ids, piece.page_table, piece.num_logits)
        begin = time.perf_counter_ns()
        result = self.call(rows, has_choices=has_choices, has_times=True)
        calls.append((begin, time.perf_counter_ns(), result))
        return result

    noted: Callable[..., StackResult] = run
    StackedLayers.run = noted  # type: ignore[method-assign]
    return calls


def _steps(calls: list[tuple[int, int, StackResult]]) -> list[Step]:
    """Returns the decode steps but for the last, which has no next one."""
    steps = []
    for (begin, end, result), (following, *_) in zip(calls[1:], calls[2:], strict=False):
        assert result.times is not None, "every call was timed"
        layers = int(result.times[-1, -1] - result.times[0, 0])
        steps.append(Step(layers / 1e6, (end - begin - layers) / 1e6, (following - end) / 1e6))
    return steps


def _print_line(name: str, times: list[float]) -> None:
    quarters = statistics.quantiles(times, n=4)
    sys.stdout.write(
        f"  {name:10}{times[0]:7.2f} ms at best, {quarters[0]:6.2f} in the best quarter, "
        f"{quarters[1]:6.2f} in the middle\n"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="checkpoint folder in Hugging Face layout")
    parser.add_argument("--products", choices=("exact", "int8"), default="exact")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser
