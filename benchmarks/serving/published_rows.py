"""Compares the roofline of the simulator with published throughputs and latencies.

    python benchmarks/run.py published_rows

Every row is one steady step, not a run: `decode` is a step of `rows` sequences on each device, in
tokens per second of a node of 8 devices; `prefill` is a step that reads whole prompts; `tpot` is
the time of a step in milliseconds. The shares of the peaks are the defaults, not fitted to the rows
(but for the share of links, which comes from two of them), so the errors are those of a roofline.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, step_time
from moe_serve.simulate.catalogue import find_device, find_model
from moe_serve.simulate.costs.device import read_device
from moe_serve.simulate.costs.model_shape import read_model_shape
from moe_serve.simulate.costs.roofline import RooflineCosts
from moe_serve.simulate.costs.routing_law import EvenRouting
from moe_serve.simulate.layout import Layout

_NODE = 8  # devices


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
    kind: Literal["decode", "prefill", "tpot"]
    rows: int
    context: int
    published: float
    micro_batches: int = 1


ROWS = (
    PublishedRow(source="DeepSeek, profile of prefill, EP32", model="deepseek-v3", device="h800",
                 devices=32, shards=1, kind="prefill", rows=16384, context=4096, published=62713,
                 micro_batches=2),
    PublishedRow(source="DeepSeek, profile of decode, EP128", model="deepseek-v3", device="h800",
                 devices=128, shards=1, kind="decode", rows=128, context=4096, published=18598,
                 micro_batches=2),
    PublishedRow(source="LMSYS, prefill, EP32, 2K prompts", model="deepseek-v3", device="h100",
                 devices=32, shards=1, kind="prefill", rows=16384, context=2048, published=54543,
                 micro_batches=2),
    PublishedRow(source="LMSYS, prefill, EP32, 4K prompts", model="deepseek-v3", device="h100",
                 devices=32, shards=1, kind="prefill", rows=16384, context=4096, published=50302,
                 micro_batches=2),
    PublishedRow(source="LMSYS, decode, EP72, 2K", model="deepseek-v3", device="h100",
                 devices=72, shards=1, kind="decode", rows=256, context=2050, published=22282,
                 micro_batches=2),
    PublishedRow(source="InferenceX, R1, TRT-LLM TP8, 1K/1K, 16", model="deepseek-v3",
                 device="h200", devices=8, shards=8, kind="tpot", rows=16, context=1536,
                 published=20.4),
    PublishedRow(source="InferenceX, R1, SGLang TP8, 1K/1K, 16", model="deepseek-v3",
                 device="h200", devices=8, shards=8, kind="tpot", rows=16, context=1536,
                 published=16.6),
    PublishedRow(source="InferenceX, R1, SGLang TP8, 1K/1K, 16", model="deepseek-v3",
                 device="b200", devices=8, shards=8, kind="tpot", rows=16, context=1536,
                 published=11.7),
    PublishedRow(source="InferenceX, R1, TRT-LLM TP8, 8K/1K, 32", model="deepseek-v3",
                 device="b200", devices=8, shards=8, kind="tpot", rows=32, context=8704,
                 published=15.9),
    PublishedRow(source="InferenceX, MiniMax-M2.5, vLLM TP4, 16", model="minimax-m2",
                 device="h100", devices=4, shards=4, kind="tpot", rows=16, context=1536,
                 published=15.5),
    PublishedRow(source="InferenceX, MiniMax-M2.5, vLLM TP8, 32", model="minimax-m2",
                 device="h200", devices=8, shards=8, kind="tpot", rows=32, context=1536,
                 published=13.7),
)  # fmt: skip


def predicted(row: PublishedRow) -> float:
    """Return the figure of a row in its unit, from the step that it describes."""
    layout = Layout.parse("colocated", row.devices, row.shards)
    model = read_model_shape(find_model(row.model), "fp8")
    device = read_device(find_device(row.device))
    costs = RooflineCosts(model, device, layout, EvenRouting(model.num_experts, model.top_k))
    ranks = Ranks(num_attention=layout.num_attention, num_experts=layout.num_holders)
    if row.kind == "prefill":
        prompts = row.rows // row.context
        load = BatchLoad.of_parts([0] * prompts, [row.context] * prompts)
    else:
        load = BatchLoad.decode(row.rows, row.context)
    seconds = step_time(costs, [load] * layout.num_attention, row.micro_batches, ranks)
    return 1e3 * seconds if row.kind == "tpot" else _NODE * row.rows / seconds


def main() -> int:
    print(f"{'source':42}{'device':>10}{'kind':>9}{'published':>11}{'predicted':>11}{'error':>8}")
    errors = []
    for row in ROWS:
        value = predicted(row)
        errors.append(abs(value / row.published - 1))
        print(
            f"{row.source:42}{row.device:>10}{row.kind:>9}{row.published:>11.1f}{value:>11.1f}"
            f"{value / row.published - 1:>+8.0%}"
        )
    print(f"median error {statistics.median(errors):.0%}, largest {max(errors):.0%}")
    return 0
