"""Recorded decode steps give the bits of the layers run one by one, and touch no page of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_kernels.graphs.graph_recorder import EagerRecorder
from moe_kernels.graphs.graph_sizes import GraphSize
from moe_kernels.kernel_choice import KernelsName
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.step_inputs import make_static_inputs
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan
from moe_serve.pipeline.graphs.decode_graphs import DecodeGraphs, GraphedPipeline
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.transport import LocalTransport
from tests.support.families.case import VOCAB_SIZE, Case
from tests.support.families.cases.deepseek import CASES as DEEPSEEK
from tests.support.families.cases.gpt_oss import CASES as GPT_OSS
from tests.support.families.cases.llama4 import CASES as LLAMA4
from tests.support.families.cases.qwen3_moe import CASES as QWEN3_MOE
from tests.support.families.parity import write_checkpoint
from tests.support.kernels.kernel_sets import KERNEL_SETS

CPU = torch.device("cpu")
CASES: dict[str, Case] = {
    "gpt_oss": GPT_OSS["gpt_oss"],  # grouped queries, windows, sinks, biases
    "deepseek_v3": DEEPSEEK["deepseek_v3-groups"],  # latents, groups of experts, shared expert
    "qwen3_moe": QWEN3_MOE["qwen3_moe-dense-layers"],
    "llama4": next(iter(LLAMA4.values())),  # chunks, inputs weighed by the router
}
MAX_POSITIONS = 128
SIZES = [GraphSize(rows, context) for rows in (1, 2, 4, 8) for context in (32, 128)]
TOKENS = np.random.default_rng(5).integers(1, VOCAB_SIZE, (6, 80))
STARTS = (33, 1, 60, 17, 47)  # positions of five sequences' next tokens
TABLES = tuple(tuple(range(1 + 5 * i, 6 + 5 * i)) for i in range(5))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_checkpoint(root / name, case) for name, case in CASES.items()}


def piece(sequence: int, start: int, count: int = 1, num_logits: int = 1) -> SequenceSlice:
    ids = TOKENS[sequence, start : start + count]
    return SequenceSlice(sequence, start, ids, TABLES[sequence], num_logits)


def plan_of(pieces: list[SequenceSlice]) -> StepPlan:
    return StepPlan((MicroBatch(tuple(pieces)),))


PROMPTS = plan_of([piece(i, 0, start, 0) for i, start in enumerate(STARTS)])
# Decode steps of 5, 3, 1 and 5 sequences; one of the last waits for no logits.
DECODED = ((0, 1, 2, 3, 4), (4, 2, 0), (3,), (0, 1, 2, 3, 4))


def decode_plans() -> list[StepPlan]:
    starts, plans = list(STARTS), []
    for step, chosen in enumerate(DECODED):
        pieces = [piece(i, starts[i], 1, int(step < 3 or i != 2)) for i in chosen]
        plans.append(plan_of(pieces))
        for i in chosen:
            starts[i] += 1
    table = (TABLES[2][0], *TABLES[2][2:])  # without its second page
    plans.append(
        plan_of([piece(0, starts[0]), replace(piece(2, 63), page_table=table, num_dropped=16)])
    )
    return plans


def assert_same_pages(cache: KVCache, other: KVCache) -> None:
    for layer, (a, b) in enumerate(zip(cache.layers, other.layers, strict=True)):
        for mine, theirs in ((a.keys, b.keys), (a.values, b.values)):
            assert torch.equal(mine[:-1], theirs[:-1]), f"layer {layer}: a page was touched"
            assert not mine[0].any(), "the empty page stays empty"


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_have_the_bits_of_the_layers(
    folders: dict[str, Path], name: str, kernels: KernelsName, dtype: torch.dtype
) -> None:
    loader = ModelLoader(folders[name], kernels=kernels, dtype=dtype)
    stage, experts = loader.attention_stage(MAX_POSITIONS), loader.expert_stage()
    plain_cache, cache = (KVCache(loader.spec, 25, 16, dtype, CPU) for _ in range(2))
    plain = Pipeline(stage, LocalTransport(experts), plain_cache, CPU)
    pipeline = Pipeline(stage, LocalTransport(experts), cache, CPU)
    recorder = EagerRecorder()
    graphs = DecodeGraphs(pipeline, stage, cache, recorder, SIZES, MAX_POSITIONS)
    assert_same_pages(cache, plain_cache)
    graphed = GraphedPipeline(pipeline, graphs)
    assert len(graphed.run(PROMPTS)) == len(plain.run(PROMPTS)) == 0
    assert recorder.num_replays == 0, "prompts are not recorded"
    for index, plan in enumerate(decode_plans()):
        expected, found = plain.run(plan), graphed.run(plan)
        assert torch.equal(found, expected), f"step {index}: {(found - expected).abs().max()}"
        assert recorder.num_replays == index + 1, f"step {index} was not replayed"
    assert_same_pages(cache, plain_cache)


def test_padding_copies_the_shortest_row_and_writes_to_scratch(folders: dict[str, Path]) -> None:
    loader = ModelLoader(folders["qwen3_moe"])
    cache = KVCache(loader.spec, 25, 16, loader.dtype, CPU)
    static = make_static_inputs(GraphSize(4, 128), cache, loader.spec, loader.kernels, 128)
    assert static is not None, "there is a plan for any room"
    places = [t.data_ptr() for t in static.tensors]
    static.load(static.pack([piece(0, 33), piece(1, 1, num_logits=0), piece(2, 60)]))
    inputs = static.inputs
    assert inputs.token_ids.tolist() == [TOKENS[0, 33], TOKENS[1, 1], TOKENS[2, 60], TOKENS[1, 1]]
    assert inputs.positions.tolist() == [33, 1, 60, 1]
    heads = cache.num_kv_heads
    pages = (inputs.kv_rows // (16 * heads)).view(4, heads)
    assert pages.tolist() == [[p] * heads for p in (TABLES[0][2], TABLES[1][0], TABLES[2][3], 26)]
    assert cache.scratch_page == 26 and len(cache.layers[0].keys) == 27
    packed = static.pack([piece(0, 33), piece(1, 1, num_logits=0), piece(2, 60)])
    assert inputs.logit_rows[: packed.num_logits].tolist() == [0, 2], "the second wants none"
    static.load(static.pack([piece(2, 61)]))
    assert [t.data_ptr() for t in static.tensors] == places
    with pytest.raises(AssertionError, match="5 rows do not fit into 4"):
        static.pack([piece(i, s) for i, s in enumerate(STARTS)])
    with pytest.raises(AssertionError, match="one token per sequence"):
        static.pack([piece(0, 33, 2)])


def test_a_row_of_nan_stays_alone(folders: dict[str, Path]) -> None:
    """The row may be the shortest one, which all padding copies."""
    loader = ModelLoader(folders["gpt_oss"], kernels="torch")
    stage, experts = loader.attention_stage(MAX_POSITIONS), loader.expert_stage()
    results: list[Tensor] = []
    for is_graphed in (False, True):
        cache = KVCache(loader.spec, 25, 16, loader.dtype, CPU)
        pipeline = Pipeline(stage, LocalTransport(experts), cache, CPU)
        runner: Pipeline | GraphedPipeline = pipeline
        if is_graphed:
            graphs = DecodeGraphs(pipeline, stage, cache, EagerRecorder(), SIZES, MAX_POSITIONS)
            runner = GraphedPipeline(pipeline, graphs)
        runner.run(PROMPTS)
        cache.layers[0].keys[TABLES[1][0]] = float("nan")
        for plan in decode_plans()[:1]:
            results.append(runner.run(plan))
        assert not cache.layers[0].keys[0].isnan().any(), "the empty page is shared by all"
        later = plan_of([piece(i, s + 1) for i, s in enumerate(STARTS) if i != 1])
        results.append(runner.run(later))
    assert results[0][1].isnan().all() and not results[0][[0, 2, 3, 4]].isnan().any()
    assert torch.equal(results[2].nan_to_num(7), results[0].nan_to_num(7))
    assert torch.equal(results[3], results[1])
