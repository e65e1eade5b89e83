"""Prompts in groups of layers have the bits of chunks: logits, pages and choices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_kernels.kernel_choice import native_refusal
from moe_serve.cache.kv_cache import KVCache
from moe_serve.config.sections import KernelsName
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.step_inputs import is_decode
from moe_serve.model.step_plan import LayerRange, MicroBatch, RouteAsk, SequenceSlice, StepPlan
from moe_serve.pipeline.groups.parked_states import ParkedStateError
from moe_serve.pipeline.groups.segments import segments
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.route_tap import RouteTap, StepChoices
from moe_serve.pipeline.stacked_layers import StackedLayers
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.pipeline.timeline.timeline_recorder import Stage, decode_records
from moe_serve.pipeline.transport import LocalTransport
from tests.support.families.all_cases import CASES
from tests.support.families.case import VOCAB_SIZE
from tests.support.families.parity import write_checkpoint

CPU = torch.device("cpu")
NATIVE = native_refusal(CPU, torch.float32) is None
needs_native = pytest.mark.skipif(not NATIVE, reason="the native kernels are not available")
# dense first layers, sliding windows and sinks, latents, shared experts with a gate, multipliers
NAMES = ("qwen3_moe-dense-layers", "gpt_oss", "deepseek_v3-groups", "qwen2_moe", "granitemoe")
TOKENS = np.random.default_rng(3).integers(1, VOCAB_SIZE, (3, 60))
TABLES = ((4, 9, 1, 2), (7, 3), (5, 6, 8))
PROMPT, SECOND = 2, 1
ASK = RouteAsk(frozenset([0, PROMPT]), has_weights=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_checkpoint(root / name, CASES[name]) for name in NAMES}


def piece(
    sequence: int, start: int, end: int, num_logits: int, layers: LayerRange | None = None
) -> SequenceSlice:
    ids = TOKENS[sequence, start:end]
    return SequenceSlice(sequence, start, ids, TABLES[sequence], num_logits, layers=layers)


def plan(*batches: list[SequenceSlice], parked: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(tuple(MicroBatch(tuple(each)) for each in batches), ASK, parked=parked)


@dataclass(slots=True)
class Run:
    """A pipeline over its own cache."""

    pipeline: Pipeline
    cache: KVCache
    tap: RouteTap

    @classmethod
    def of(cls, loader: ModelLoader, *, is_stacked: bool) -> Run:
        stage, experts = loader.attention_stage(64), loader.expert_stage()
        cache = KVCache(loader.spec, 10, 16, loader.dtype, CPU)
        tap = RouteTap(loader.spec.router.num_experts)
        pipeline = Pipeline(stage, LocalTransport(experts), cache, CPU, tap=tap)
        if is_stacked:
            pipeline.stacked = StackedLayers.of(stage, experts, cache)
        return cls(pipeline, cache, tap)

    def step(self, of: StepPlan) -> tuple[Tensor, StepChoices | None]:
        return self.pipeline.run(of), self.tap.end(of)


def chunked(run: Run) -> tuple[list[Tensor], list[StepChoices | None]]:
    """Runs sequence 0, which decodes while the prompt is read in three chunks."""
    found = [run.step(plan([piece(0, 0, 33, 1)]))]
    for number, start in enumerate((0, 15, 30)):
        decoding = piece(0, 33 + number, 34 + number, 1)
        reading = piece(PROMPT, start, start + 15, int(start == 30))
        found.append(run.step(plan([decoding, reading])))
    logits, choices = zip(*found, strict=True)
    return list(logits), list(choices)


def layered(
    run: Run, num_layers: int, borders: tuple[int, ...], *, is_split: bool = False
) -> tuple[list[Tensor], list[StepChoices | None]]:
    """Runs the same in groups of layers. A step without the prompt comes between two groups."""
    found, number = [run.step(plan([piece(0, 0, 33, 1)]))], 0
    for first, end in zip(borders, borders[1:], strict=False):
        layers = LayerRange(first, end, num_layers)
        decoding = piece(0, 33 + number, 34 + number, 1)
        reading = piece(PROMPT, 0, 45, int(layers.is_last), layers)
        batches = [[decoding], [reading]] if is_split else [[decoding, reading]]
        found.append(run.step(plan(*batches, parked=(PROMPT,) if first else ())))
        number += 1
        if first == 0:
            found.append(run.step(plan([piece(0, 34, 35, 1)], parked=(PROMPT,))))
            number += 1
    logits, choices = zip(*found, strict=True)
    return list(logits), list(choices)


def rows_by_sequence(choices: list[StepChoices | None], sequence: int) -> list[np.ndarray]:
    """Returns the choices and weights of one sequence over all steps."""
    ids, weights = [], []
    for each in choices:
        end = 0
        for key, count in zip(each.sequence_ids, each.counts, strict=True) if each else ():
            end += count
            if key == sequence and each is not None and each.weights_NLK is not None:
                ids.append(each.expert_ids_NLK[end - count : end])
                weights.append(each.weights_NLK[end - count : end])
    return [np.concatenate(ids), np.concatenate(weights)]


@pytest.mark.sampled
@pytest.mark.parametrize("is_split", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("is_stacked", [False, True], ids=["by layer", "stacked"])
@pytest.mark.parametrize("name", NAMES)
def test_groups_of_layers_have_the_bits_of_chunks(
    folders: dict[str, Path], name: str, is_stacked: bool, is_split: bool
) -> None:
    loader = ModelLoader(folders[name], kernels="native" if NATIVE else "torch", num_threads=1)
    num_layers = loader.spec.num_layers
    plain, run = (Run.of(loader, is_stacked=is_stacked) for _ in range(2))
    logits, choices = chunked(plain)
    mine, my_choices = layered(run, num_layers, (0, 1, num_layers), is_split=is_split)
    assert [len(each) for each in mine] == [1, 1, 1, 2]
    assert torch.equal(torch.cat(mine), torch.cat(logits))
    for layer, (one, other) in enumerate(zip(run.cache.layers, plain.cache.layers, strict=True)):
        assert torch.equal(one.keys, other.keys), f"keys of layer {layer}"
        assert torch.equal(one.values, other.values), f"values of layer {layer}"
    for sequence in (0, PROMPT):
        found = rows_by_sequence(my_choices, sequence)
        for each, wanted in zip(found, rows_by_sequence(choices, sequence), strict=True):
            assert np.array_equal(each, wanted), f"choices of sequence {sequence}"


def test_segments_cover_all_layers() -> None:
    whole, some = piece(0, 0, 1, 1), piece(1, 0, 9, 0, LayerRange(2, 5, 8))
    found = segments(MicroBatch((whole, some)), 8)
    assert [(s.first, s.end, s.batch.slices) for s in found] == [
        (0, 2, (whole,)),
        (2, 5, (whole, some)),
        (5, 8, (whole,)),
    ]
    alone = segments(MicroBatch((some,)), 8)
    assert [(s.first, s.end, s.batch.slices) for s in alone] == [
        (0, 2, ()),
        (2, 5, (some,)),
        (5, 8, ()),
    ]


@pytest.fixture(scope="module")
def run(folders: dict[str, Path]) -> Run:
    return Run.of(ModelLoader(folders["gpt_oss"], kernels="torch", num_threads=1), is_stacked=False)


def group(first: int, end: int, total: int) -> SequenceSlice:
    return piece(PROMPT, 0, 45, int(end == total), LayerRange(first, end, total))


def test_a_step_can_be_repeated_from_its_states(run: Run) -> None:
    """The states of the last step are kept until a later step shows that they are not needed."""
    total, parked = run.pipeline._stage.spec.num_layers, run.pipeline.parked
    run.step(plan([group(0, 1, total)]))
    size = parked.num_bytes
    second = plan([group(1, total, total)], parked=(PROMPT,))
    first_time, again = run.step(second)[0], run.step(second)[0]
    assert torch.equal(first_time, again) and len(again) == 1
    assert parked.num_bytes == size, "nothing is parked behind the last layer"
    run.step(plan([piece(0, 0, 5, 1)], parked=(PROMPT,)))
    assert parked.num_bytes == size, "a step without the prompt keeps its state"
    run.step(plan([piece(0, 5, 6, 1)]))
    assert parked.num_bytes == 0, "a step that does not name the prompt drops its state"
    with pytest.raises(ParkedStateError, match=r"none, but 45 rows are needed"):
        run.step(second)


def test_a_state_that_is_not_finite_is_noted(run: Run) -> None:
    total, parked = run.pipeline._stage.spec.num_layers, run.pipeline.parked
    run.step(plan([group(0, 1, total)]))
    with torch.inference_mode():
        parked.take(group(1, total, total))[7, 3] = float("nan")
    logits, _ = run.step(plan([piece(0, 0, 5, 1), group(1, total, total)], parked=(PROMPT,)))
    assert parked.not_finite == {PROMPT}
    assert logits[0].isfinite().all(), "the rows beside it are not affected"
    parked.forget([PROMPT])
    assert parked.num_bytes == 0


def test_choices_of_some_groups_only_are_not_returned(run: Run) -> None:
    """A listener that starts between two groups would get a part of the layers."""
    total = run.pipeline._stage.spec.num_layers
    run.step(replace(plan([group(0, 1, total)]), routes=None))
    _, choices = run.step(plan([group(1, total, total), piece(0, 0, 4, 1)], parked=(PROMPT,)))
    assert choices is not None and choices.sequence_ids == (0,)


@pytest.mark.parametrize("is_stacked", [False, pytest.param(True, marks=needs_native)])
def test_the_timeline_shows_the_rows_of_each_layer(
    folders: dict[str, Path], is_stacked: bool
) -> None:
    kind: KernelsName = "native" if NATIVE else "torch"
    loader = ModelLoader(folders["gpt_oss"], kernels=kind, num_threads=1)
    run, total = Run.of(loader, is_stacked=is_stacked), loader.spec.num_layers
    log = run.pipeline._log = StageLog(is_recording=True)
    run.step(plan([piece(0, 0, 5, 1)]))
    log.begin(0)
    run.step(plan([piece(0, 5, 6, 1), group(0, 1, total)]))
    records = decode_records(log.take()).records
    for stage in (Stage.ATTENTION, Stage.DISPATCH, Stage.COMBINE):
        rows = {r["layer"]: r["rows"] for r in records if r["stage"] == stage}
        assert rows == {layer: 46 if layer == 0 else 1 for layer in range(total)}, stage
    assert [r["rows"] for r in records if r["stage"] == Stage.LOGITS] == [1]


def test_a_group_of_one_token_is_not_recorded_as_a_graph() -> None:
    one = piece(0, 0, 1, 0, LayerRange(0, 1, 4))
    assert is_decode(MicroBatch((piece(0, 0, 1, 1),)))
    assert not is_decode(MicroBatch((one,)))
