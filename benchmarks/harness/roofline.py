"""Computes the best possible figures: bytes over bandwidth, and operations over peak."""

from __future__ import annotations

from dataclasses import dataclass

from .machine import MachineLimits
from .model_size import ModelSize
from .work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least time of one step, and the limit that sets it."""

    seconds: float
    limit: str  # "memory" or "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The best possible figures. A model that fits into the CPU's caches may exceed a memory
    limit.
    """

    ttft_s: float
    single_decode_tok_s: float
    batch_total_tok_s: float
    batch_decode_tok_s: float
    prefill_tok_s: float
    limited_by: dict[str, str]


def roofline(machine: MachineLimits, size: ModelSize, work: Work) -> Roofline:
    """Computes the limits; the number of touched experts is that of an even router."""
    first = _prefill(machine, size, 1, work.single_prompt)
    single = _decode(machine, size, 1, work.single_prompt + work.single_output / 2)
    batch = _decode(machine, size, work.batch_size, work.batch_prompt + work.batch_output / 2)
    batch_first = _prefill(machine, size, work.batch_size, work.batch_prompt)
    prefill = _prefill(machine, size, 1, work.prefill_prompt)
    batch_s = batch_first.seconds + (work.batch_output - 1) * batch.seconds
    return Roofline(
        ttft_s=first.seconds,
        single_decode_tok_s=1 / single.seconds,
        batch_total_tok_s=work.batch_size * work.batch_output / batch_s,
        batch_decode_tok_s=work.batch_size / batch.seconds,
        prefill_tok_s=work.prefill_prompt / prefill.seconds,
        limited_by={
            "ttft_s": first.limit,
            "single_decode_tok_s": single.limit,
            "batch_total_tok_s": batch.limit,
            "batch_decode_tok_s": batch.limit,
            "prefill_tok_s": prefill.limit,
        },
    )


def _decode(machine: MachineLimits, size: ModelSize, num_rows: int, context: float) -> Bound:
    num_kv = round(num_rows * context)
    num_bytes = size.step_bytes(num_rows, num_kv)
    return _bound(machine, size, num_bytes, size.step_flop(num_rows, num_rows, num_kv))


def _prefill(machine: MachineLimits, size: ModelSize, num_prompts: int, length: int) -> Bound:
    """Returns the bound of a prompt: a row attends to half of its length on average; one row has
    logits.
    """
    num_rows = num_prompts * length
    flop = size.step_flop(num_rows, num_prompts, num_rows * length / 2)
    return _bound(machine, size, size.step_bytes(num_rows, 0), flop)


def _bound(machine: MachineLimits, size: ModelSize, num_bytes: float, flop: float) -> Bound:
    memory_s = num_bytes / (machine.read_gb_s * 1e9)
    compute_s = flop / (machine.gemm_gflop_s(size.dtype) * 1e9)
    if memory_s >= compute_s:
        return Bound(seconds=memory_s, limit="memory")
    return Bound(seconds=compute_s, limit="compute")
