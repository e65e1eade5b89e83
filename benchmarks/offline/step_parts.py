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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.machine import measure_limits
from harness.model_size import read_stored_bytes
from moe_kernels.cpu.native_stack import NativeStack
from moe_kernels.interface.layer_stack import StackResult, StackRows
from moe_serve import LLM, SamplingParams

_PROMPT = 128


@dataclass(frozen=True, slots=True)
class Step:
    """Times of one decode step in ms; `python`: until the next call, `python_cpu`: likewise, of
    the thread that runs the engine."""

    layers: float
    head: float
    python: float
    python_cpu: float

    @property
    def outside(self) -> float:
        return self.head + self.python


@dataclass(frozen=True, slots=True)
class Call:
    """A call of all layers, in ns: the clock and the thread's CPU time at its begin and end, and
    the clock of its layers."""

    begin: int
    end: int
    begin_cpu: int
    end_cpu: int
    layers: int


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
        speculation="off",
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
            for name in ("layers", "head", "python", "python_cpu", "outside"):
                _print_line(name, sorted(getattr(step, name) for step in steps))
    return 0


def _noted_calls() -> list[Call]:
    """Returns a list that gets every call of the layers from now on."""
    calls: list[Call] = []
    original = NativeStack.__call__

    def run(self: NativeStack, rows: StackRows, **options: Any) -> StackResult:
        begin, begin_cpu = time.perf_counter_ns(), time.thread_time_ns()
        result = original(self, rows, **options | {"has_times": True})
        assert result.times is not None, "every call is timed"
        layers = int(result.times[-1, -1] - result.times[0, 0])
        calls.append(Call(begin, time.perf_counter_ns(), begin_cpu, time.thread_time_ns(), layers))
        return replace(result, times=None)  # no request has asked for them

    noted: Callable[..., StackResult] = run
    NativeStack.__call__ = noted  # type: ignore[method-assign]
    return calls


def _steps(calls: list[Call]) -> list[Step]:
    """Returns the decode steps but for the last, which has no next one."""
    return [
        Step(
            call.layers / 1e6,
            (call.end - call.begin - call.layers) / 1e6,
            (following.begin - call.end) / 1e6,
            (following.begin_cpu - call.end_cpu) / 1e6,
        )
        for call, following in zip(calls[1:], calls[2:], strict=False)
    ]


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
