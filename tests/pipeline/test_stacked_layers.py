"""All layers in one call have the bits and the records of the layers run one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_kernels.kernel_choice import native_refusal
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.step_plan import MicroBatch, RouteAsk, SequenceSlice, StepPlan
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.route_tap import RouteTap
from moe_serve.pipeline.stacked_layers import StackedLayers
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.pipeline.timeline.timeline_recorder import Stage, decode_records
from moe_serve.pipeline.transport import LocalTransport
from tests.support.families.all_cases import CASES
from tests.support.families.case import VOCAB_SIZE
from tests.support.families.parity import write_checkpoint

CPU = torch.device("cpu")
REFUSAL = native_refusal(CPU, torch.float32)
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
COVERED = ("gpt_oss", "qwen3_moe-dense-layers", "glm4_moe-qk-norm-groups")
OUTSIDE = {
    "deepseek_v3-groups": "latent attention",
    "granitemoe": "multipliers",
    "llama4": "inputs weighed by the router",
    "qwen2_moe": "a gate of the shared expert",
}
TOKENS = np.random.default_rng(3).integers(1, VOCAB_SIZE, (3, 60))
TABLES = ((4, 9, 1, 2), (7, 3), (5, 6, 8))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_checkpoint(root / name, CASES[name]) for name in (*COVERED, *OUTSIDE)}


def piece(sequence: int, start: int, end: int, num_logits: int) -> SequenceSlice:
    ids = TOKENS[sequence, start:end]
    return SequenceSlice(sequence, start, ids, TABLES[sequence], num_logits)


def plans() -> list[StepPlan]:
    """Returns prompts (one of them cut), a step that decodes and reads, several rows of one
    sequence, and a step of two micro-batches."""
    ask = RouteAsk(frozenset([0, 2]), has_weights=True)
    steps = [
        [piece(0, 0, 33, 1), piece(1, 0, 17, 0)],
        [piece(0, 33, 34, 1), piece(1, 17, 20, 1), piece(2, 0, 40, 40)],
        [piece(2, 40, 44, 4), piece(0, 34, 35, 1)],
    ]
    whole = [StepPlan((MicroBatch(tuple(step)),), ask) for step in steps]
    parts = [MicroBatch((piece(0, 35, 36, 1),)), MicroBatch((piece(2, 44, 45, 1),))]
    return [*whole, StepPlan(tuple(parts), ask), replace(whole[-1], routes=None)]


class Run:
    """A pipeline over its own cache, and the records that it keeps."""

    def __init__(self, loader: ModelLoader, is_stacked: bool) -> None:
        stage, experts = loader.attention_stage(64), loader.expert_stage()
        self.cache = KVCache(loader.spec, 9, 16, loader.dtype, CPU)
        self.log, self.tap = StageLog(is_recording=True), RouteTap(loader.spec.router.num_experts)
        transport = LocalTransport(experts)
        self.pipeline = Pipeline(stage, transport, self.cache, CPU, self.log, self.tap)
        self.pipeline.keeps_hidden = True
        if is_stacked:
            self.pipeline.stacked = StackedLayers.of(stage, experts, self.cache)
            assert self.pipeline.stacked is not None, "the model has its layers as one call"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", COVERED)
def test_one_call_has_the_bits_of_the_layers(
    folders: dict[str, Path], name: str, dtype: torch.dtype
) -> None:
    loader = ModelLoader(folders[name], kernels="native", dtype=dtype, num_threads=2)
    runs = stacked, plain = Run(loader, True), Run(loader, False)
    for number, each in enumerate(plans()):
        plan = replace(each, num_guesses=1)
        for run in runs:
            run.log.begin(number)
        logits, expected = (run.pipeline.run(plan) for run in runs)
        assert torch.equal(logits, expected), f"step {number}"
        hidden, expected_hidden = stacked.pipeline.hidden_RD, plain.pipeline.hidden_RD
        assert hidden is not None and expected_hidden is not None
        assert torch.equal(hidden, expected_hidden), f"step {number}"
        choices, expected_choices = (run.tap.end(plan) for run in runs)
        assert (choices is None) == (expected_choices is None) == (plan.routes is None)
        if choices is not None and expected_choices is not None:
            assert choices.sequence_ids == expected_choices.sequence_ids
            assert np.array_equal(choices.expert_ids_NLK, expected_choices.expert_ids_NLK)
            assert choices.weights_NLK is not None and expected_choices.weights_NLK is not None
            assert np.array_equal(choices.weights_NLK, expected_choices.weights_NLK)
    for mine, theirs in zip(stacked.cache.layers, plain.cache.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)


@pytest.mark.parametrize("name", COVERED)
def test_its_stages_are_recorded_as_those_of_the_layers(
    folders: dict[str, Path], name: str
) -> None:
    loader = ModelLoader(folders[name], kernels="native")
    found = []
    for is_stacked in (True, False):
        run = Run(loader, is_stacked)
        run.log.begin(0)
        run.pipeline.run(plans()[0])
        records = decode_records(run.log.take()).records
        found.append(sorted((r["layer"], r["stage"], r["rows"]) for r in records))
        assert (records["end_ns"] >= records["start_ns"]).all()
        assert records["start_ns"].min() >= 1e9 * run.log.began - 1e3
    dense = [layer for layer, each in enumerate(loader.spec.layers) if not each.is_sparse]
    sums = [(layer, Stage.COMBINE, 50) for layer in dense]  # by layer it is a part of the front
    assert found[0] == sorted(found[1] + sums)


def test_a_hang_report_names_the_layer(folders: dict[str, Path]) -> None:
    run = Run(ModelLoader(folders["gpt_oss"], kernels="native"), True)
    run.log.begin(7)
    run.pipeline.run(plans()[0])
    assert str(run.log.operation) == f"step 7: step, layer {len(run.cache.layers) - 1}"


@pytest.mark.parametrize("name", OUTSIDE)
def test_models_that_keep_their_layers_apart(folders: dict[str, Path], name: str) -> None:
    loader = ModelLoader(folders[name], kernels="native")
    cache = KVCache(loader.spec, 9, 16, loader.dtype, CPU)
    stage, experts = loader.attention_stage(64), loader.expert_stage()
    assert StackedLayers.of(stage, experts, cache) is None, OUTSIDE[name]


def test_experts_in_several_banks_or_elsewhere_are_not_stacked(folders: dict[str, Path]) -> None:
    loader = ModelLoader(folders["gpt_oss"], kernels="native")
    cache = KVCache(loader.spec, 9, 16, loader.dtype, CPU)
    stage, count = loader.attention_stage(64), loader.spec.router.num_experts
    some = [range(count - 1)] * loader.spec.num_layers
    assert StackedLayers.of(stage, loader.expert_stage(some), cache) is None
    whole = loader.expert_stage()
    banks = whole.layer(0)
    assert banks.whole_bank is not None
    assert loader.expert_room(some, loader.spec.num_layers * count).layer(0).whole_bank is None
    torch_kernels = ModelLoader(folders["gpt_oss"], kernels="torch")
    assert StackedLayers.of(torch_kernels.attention_stage(64), whole, cache) is None
