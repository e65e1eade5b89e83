"""Measures a drafting head beside a decode step of its model, both without an engine.

    python benchmarks/run.py drafting --threads 1
    python benchmarks/run.py drafting --kernels torch

The least and the median time of many calls, with the caches as the last call left them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moe_serve.cache.kv_cache import KVCache
from moe_serve.config.sections import ModelConfig
from moe_serve.engine.opened_model import OpenedModel, model_folder
from moe_serve.model.speculation_head import SpeculationHead
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.transport import LocalTransport

_CONTEXT, _PAGE_SIZE, _DRAFTED = 256, 16, 4
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of a call."""

    least: float
    median: float

    @classmethod
    def of(cls, work: Callable[[], object], num_calls: int) -> Times:
        times = list[float]()
        for _ in range(num_calls):
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e6)
        return cls(min(times), statistics.median(times))


def decode_step(num_sequences: int) -> StepPlan:
    """Makes a step of one token for each sequence, behind `_CONTEXT` tokens."""
    pages = _CONTEXT // _PAGE_SIZE + 1
    slices = [
        SequenceSlice(
            sequence_id=index,
            start=_CONTEXT,
            token_ids=np.array([300 + index]),
            page_table=tuple(range(1 + index * pages, 1 + (index + 1) * pages)),
            num_logits=1,
        )
        for index in range(num_sequences)
    ]
    return StepPlan((MicroBatch(tuple(slices)),))


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a drafting head.")
    parser.add_argument("--model", help="checkpoint folder (default: the demonstration model)")
    parser.add_argument(
        "--head", type=Path, help="default: speculation_head/ in the model's folder"
    )
    parser.add_argument("--kernels", choices=("native", "torch"), default="native")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    config = ModelConfig(path=arguments.model, device="cpu", kernels=arguments.kernels)
    opened = OpenedModel.open(model_folder(config), config, arguments.threads, _CPU)
    opened.set_torch_threads()
    loader, spec = opened.loader, opened.spec
    stage = loader.attention_stage(2 * _CONTEXT)
    most_pages = max(arguments.sequences) * (_CONTEXT // _PAGE_SIZE + 1)
    cache = KVCache(spec, most_pages, _PAGE_SIZE, loader.dtype, _CPU)
    pipeline = Pipeline(stage, LocalTransport(loader.expert_stage()), cache, _CPU)
    folder = arguments.head or opened.folder / "speculation_head"
    head = SpeculationHead.load_for(stage, folder)
    print(f"{loader.kernels.name}; microseconds, least / median of {arguments.calls} calls")
    for count in arguments.sequences:
        hidden_SD = torch.randn(count, spec.width).to(loader.dtype)
        tokens_S, plan = torch.arange(count) + 300, decode_step(count)
        step = Times.of(lambda p=plan: pipeline.run(p), arguments.calls)  # type: ignore[misc]
        draft = Times.of(
            lambda h=hidden_SD, t=tokens_S: head.draft(h, t, _DRAFTED),  # type: ignore[misc]
            arguments.calls,
        )
        print(
            f"{count:3} sequences: a step {step.least:.0f} / {step.median:.0f}, one token drafted "
            f"for all {draft.least / _DRAFTED:.0f} / {draft.median / _DRAFTED:.0f}, ratio "
            f"of the least times {draft.least / _DRAFTED / step.least:.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
