"""Recorded decode steps of the Triton set are replayed launch for launch.

The interpreter replays from a tape, a CUDA device as CUDA graphs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_kernels.graphs.graph_recorder import CudaRecorder
from moe_kernels.graphs.graph_sizes import GraphSize
from moe_kernels.kernel_choice import KernelsName
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan
from moe_serve.pipeline.graphs.decode_graphs import DecodeGraphs, GraphedPipeline
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.transport import LocalTransport
from tests.moe_kernels.gpu.test_gpu_kernels import CASES, TOKENS
from tests.support.families.parity import write_checkpoint
from tests.support.kernels.tape_recorder import TapeRecorder

pytestmark = pytest.mark.usefixtures("rows_are_alike")
MAX_POSITIONS = 64
SIZE = GraphSize(4, MAX_POSITIONS)
TABLES = ((4, 2), (1,), (5, 3))


def piece(sequence: int, start: int, count: int = 1) -> SequenceSlice:
    ids = np.roll(TOKENS, sequence)[start : start + count]
    return SequenceSlice(sequence, start, ids, TABLES[sequence], int(count == 1))


def plan_of(*pieces: SequenceSlice) -> StepPlan:
    return StepPlan((MicroBatch(pieces),))


PROMPTS = plan_of(piece(0, 0, 16), piece(1, 0, 2), piece(2, 0, 5))
STEPS = (
    plan_of(piece(0, 16), piece(1, 2), piece(2, 5)),
    plan_of(piece(2, 6)),  # the others wait; three rows of padding
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_checkpoint(root / name, case) for name, case in CASES.items()}


def load(folder: Path, device: torch.device, kernels: KernelsName = "triton") -> ModelLoader:
    return ModelLoader(folder, kernels=kernels, dtype=torch.float32, device=device)


def make_caches(loader: ModelLoader) -> tuple[KVCache, KVCache]:
    one, other = (KVCache(loader.spec, 5, 16, torch.float32, loader.device) for _ in range(2))
    return one, other


def make_recorder(device: torch.device) -> TapeRecorder | CudaRecorder:
    return TapeRecorder() if device.type == "cpu" else CudaRecorder(device)


def assert_replayed(recorder: TapeRecorder | CudaRecorder, num_recordings: int) -> None:
    if isinstance(recorder, TapeRecorder):  # a CUDA graph does not count
        counts = [(len(tape.launches) > 0, tape.num_replays) for tape in recorder.tapes]
        assert counts == [(True, len(STEPS))] * num_recordings, f"{counts}"


def read_prompts(loader: ModelLoader, caches: tuple[KVCache, KVCache]) -> None:
    """Reads the prompts into the first cache and copies it to the second."""
    stage, transport = loader.attention_stage(MAX_POSITIONS), LocalTransport(loader.expert_stage())
    Pipeline(stage, transport, caches[0], loader.device).run(PROMPTS)
    for mine, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        mine.keys.copy_(theirs.keys)
        mine.values.copy_(theirs.values)


def assert_same_steps(plain: Pipeline, other: Pipeline | GraphedPipeline) -> None:
    for index, step in enumerate(STEPS):
        want, got = plain.run(step), other.run(step)
        assert torch.equal(want, got), f"step {index}: {(want - got).abs().max()}"


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_a_recorded_step_serves_all_that_fit(
    folders: dict[str, Path], name: str, device: torch.device
) -> None:
    """gpt_oss has grouped queries, windows and sinks; deepseek_v3 latents and a shared expert."""
    loader = load(folders[name], device)
    stage, experts = loader.attention_stage(MAX_POSITIONS), loader.expert_stage()
    caches = make_caches(loader)
    plain, pipeline = (Pipeline(stage, LocalTransport(experts), c, device) for c in caches)
    recorder = make_recorder(device)
    graphs = DecodeGraphs(pipeline, stage, caches[1], recorder, [SIZE], MAX_POSITIONS)
    read_prompts(load(folders[name], device, "torch"), caches)  # the interpreter would take seconds
    assert_same_steps(plain, GraphedPipeline(pipeline, graphs))
    assert_replayed(recorder, 1)
    for mine, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        assert torch.equal(mine.keys[:-1], theirs.keys[:-1]), "padding wrote to a page"
        assert torch.equal(mine.values[:-1], theirs.values[:-1]), "padding wrote to a page"
