"""Measures a set of CPU kernels on one layer of the 1.26 B model, beside the limits.

    python benchmarks/run.py cpu_kernels --threads 2
    python benchmarks/run.py cpu_kernels --threads 1 --dtype float32 --kernels torch
    python benchmarks/run.py cpu_kernels --threads 2 --weights int4 --products int8

See benchmarks/README.md. T rows, D model width, F expert width, E experts, K top-k.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harness.machine import MachineLimits, measure_limits
from kernel_bench.rounded_weights import WEIGHTS, stored
from moe_kernels.interface.attention_shape import AttentionShape, QKNormWeights, StepRows
from moe_kernels.interface.kernels import AttentionCall, ExpertWeights, GatedActivation, Kernels
from moe_kernels.interface.kv_form import KVPages
from moe_kernels.kernel_choice import choose_kernels
from moe_kernels.reference.norm import rotary_table

D, F, E, K = 1024, 768, 32, 4
HEADS, KV_HEADS, HEAD_DIM, PAGE = 16, 4, 64, 16
NUM_LAYERS = 3  # sets of weights and pages, used in turn so that the caches hold none of them
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call to measure: `run(layer)` reads `num_bytes` of weights or pages and does `flop`
    operations.
    """

    name: str
    run: Callable[[int], object]
    num_bytes: float
    flop: float


def expert_cases(kernels: Kernels, dtype: torch.dtype, weights: str) -> Iterator[Case]:
    """Returns the routed rows of a decode step and of a prompt for a layer's experts."""
    gate, down = (stored((torch.randn(n, k) / 32).to(dtype), weights) for n, k in ((F, D), (D, F)))
    expert = ExpertWeights(gate, gate, down)
    yield from _expert_cases(kernels, dtype, expert)


def _expert_cases(kernels: Kernels, dtype: torch.dtype, expert: ExpertWeights) -> Iterator[Case]:
    weights = [expert] * E
    banks = [kernels.experts(weights, GatedActivation()) for _ in range(NUM_LAYERS)]
    for num_rows in (1, 4, 16, 128, 1024):
        x_TD = torch.randn(num_rows, D).to(dtype)
        ids_TK = torch.rand(num_rows, E).topk(K).indices.sort().values
        weights_TK = torch.rand(num_rows, K)
        yield Case(
            name=f"experts, {num_rows} rows",
            run=lambda i, a=(x_TD, ids_TK, weights_TK): banks[i](*a),  # type: ignore[misc]
            num_bytes=len(ids_TK.unique()) * expert.num_bytes,
            flop=num_rows * K * 6 * D * F,
        )


def linear_cases(kernels: Kernels, dtype: torch.dtype, weights: str) -> Iterator[Case]:
    """Returns the projection to queries, keys and values."""
    outputs = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    matrix = stored((torch.randn(outputs, D) / 32).to(dtype), weights)
    layers = [kernels.linear(matrix) for _ in range(16)]
    for num_rows in (1, 16, 1024):
        x_TD = torch.randn(num_rows, D).to(dtype)
        yield Case(
            name=f"linear {D} to {outputs}, {num_rows} rows",
            run=lambda i, x_TD=x_TD: [layer(x_TD) for layer in layers],  # type: ignore[misc]
            num_bytes=len(layers) * matrix.nbytes,
            flop=len(layers) * num_rows * 2 * outputs * D,
        )


def attention_cases(kernels: Kernels, dtype: torch.dtype, weights: str) -> Iterator[Case]:
    """Returns prompts, and decode steps of one or many sequences."""
    for num_sequences, start, count in ((1, 0, 1024), (1, 200, 1), (16, 200, 1), (1, 4000, 1)):
        num_keys = num_sequences * sum(range(start + 1, start + count + 1))
        num_stored = num_sequences * (start + count)
        yield Case(
            name=f"attention, {num_sequences} x {count} after {start}",
            run=_attention(kernels, dtype, num_sequences, start, count),
            num_bytes=2 * num_stored * KV_HEADS * HEAD_DIM * dtype.itemsize,
            flop=4 * num_keys * HEADS * HEAD_DIM,
        )


def _attention(
    kernels: Kernels, dtype: torch.dtype, num_sequences: int, start: int, count: int
) -> Callable[[int], Tensor]:
    shape = AttentionShape(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, qk_norm="head"
    )
    each = -(-(start + count) // PAGE)
    size = (1 + num_sequences * each, KV_HEADS, PAGE, HEAD_DIM)
    pages = [
        KVPages(torch.randn(size).to(dtype), torch.randn(size).to(dtype)) for _ in range(NUM_LAYERS)
    ]
    tables = (1 + np.arange(num_sequences * each)).reshape(num_sequences, each)
    positions = np.tile(np.arange(start, start + count), num_sequences)
    sequences = np.repeat(np.arange(num_sequences), count)
    rows = tables[sequences, positions // PAGE] * KV_HEADS * PAGE + positions % PAGE
    kv_rows = torch.from_numpy((rows[:, None] + np.arange(KV_HEADS) * PAGE).reshape(-1))
    lens, starts = np.full(num_sequences, count), np.full(num_sequences, start)
    step = StepRows(lens, starts, tables.tolist(), PAGE)
    plan = kernels.plan_attention(step, shape, CPU)
    norm = QKNormWeights(*(torch.ones(HEAD_DIM, dtype=dtype) for _ in range(2)))
    angles = torch.arange(start + count)[:, None] * torch.logspace(0, -3, HEAD_DIM // 2)[None]
    rotary = rotary_table(angles.float())
    qkv = torch.randn(len(positions), (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype)
    where = torch.from_numpy(positions)
    calls = [AttentionCall(rotary, where, kv_rows, each, plan) for each in pages]
    return lambda i: kernels.attend(qkv, norm, None, calls[i], shape)


def best_time(case: Case, seconds: float) -> float:
    """Returns the least time of a call, with alternating layers, because noise can only add
    time.
    """
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        case.run(len(times) % NUM_LAYERS)
        times.append(time.perf_counter() - start)
    return min(times[2:])


def print_row(case: Case, seconds: float, limits: MachineLimits, dtype: str) -> None:
    memory_s = case.num_bytes / limits.read_gb_s / 1e9
    compute_s = case.flop / limits.gemm_gflop_s(dtype) / 1e9
    sys.stdout.write(
        f"{case.name:32}{seconds * 1e6:10.0f} us{case.num_bytes / seconds / 1e9:8.1f} GB/s"
        f"{case.flop / seconds / 1e9:8.0f} GFLOP/s{max(memory_s, compute_s) / seconds:6.0%} "
        f"of {'memory' if memory_s > compute_s else 'compute'}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--kernels", choices=["auto", "native", "torch"], default="auto")
    parser.add_argument("--weights", choices=WEIGHTS, default="floats", help="of the matrices")
    parser.add_argument("--products", choices=["exact", "int8"], default="exact")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    limits = measure_limits(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    kernels = choose_kernels(CPU, dtype, arguments.kernels, arguments.threads, arguments.products)
    sys.stdout.write(
        f"{kernels.name}, {arguments.threads} threads, {arguments.weights} weights, "
        f"{arguments.products} products; limits: {limits.read_gb_s:.1f} GB/s, "
        f"{limits.gemm_gflop_s(arguments.dtype):.0f} GFLOP/s; others use "
        f"{limits.busy_cores:.1f} cores\n"
    )
    for cases in (expert_cases, linear_cases, attention_cases):
        for case in cases(kernels, dtype, arguments.weights):
            print_row(case, best_time(case, arguments.seconds), limits, arguments.dtype)
    return 0
