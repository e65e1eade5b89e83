"""Stages that hold a part of the experts: the weights they read, their sums, and takeovers.

T rows, K choices per row, D model width.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from experts.expert_stage import ExpertStage
from moe_kernels.cpu.cpu_library import NativeLibrary
from moe_kernels.kernel_choice import KernelsName, native_refusal
from moe_serve.model.checkpoint.checkpoint import Checkpoint
from moe_serve.model.load.loader import ModelLoader
from tests.support.families.case import TINY, Case
from tests.support.families.parity import write_checkpoint
from tests.support.kernels.kernel_sets import KERNEL_SETS

NUM_EXPERTS, TOP_K, ROWS = 6, 3, 11
REFUSAL = native_refusal(torch.device("cpu"), torch.float32)
SMALL = TINY | {"hidden_size": 32, "num_hidden_layers": 3}
CASES = {
    "qwen3_moe": Case(  # separate tensors, a dense layer
        transformers.Qwen3MoeConfig(
            **SMALL,
            head_dim=16,
            intermediate_size=48,
            moe_intermediate_size=24,
            num_experts=NUM_EXPERTS,
            mlp_only_layers=[1],
        )
    ),
    "gpt_oss": Case(  # fused tensors, transposed and interleaved, with biases
        transformers.GptOssConfig(
            **SMALL, head_dim=16, intermediate_size=24, num_local_experts=NUM_EXPERTS
        )
    ),
}


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), CASES[request.param])


def rows(width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, ascending ids, and weights."""
    generator = torch.Generator().manual_seed(5)
    ids_TK = torch.rand(ROWS, NUM_EXPERTS, generator=generator).topk(TOP_K).indices.sort().values
    x_TD = torch.randn(ROWS, width, generator=generator)
    return x_TD, ids_TK, torch.rand(ROWS, TOP_K, generator=generator)


def only(ids_TK: Tensor, held: Collection[int]) -> Tensor:
    """Replaces choices that are not held by -1."""
    return torch.where(torch.isin(ids_TK, torch.tensor(sorted(held))), ids_TK, -1)


def part_of(stage: ExpertStage, layer: int, width: int) -> Tensor:
    x_TD, ids_TK, weights_TK = rows(width)
    return stage.partial(layer, x_TD, only(ids_TK, stage.held(layer)), weights_TK)


@pytest.mark.parametrize("name", KERNEL_SETS)
def test_parts_add_up_to_the_whole(folder: Path, name: KernelsName) -> None:
    """A rank may hold no expert of a layer, and an expert may have been taken over."""
    loader = ModelLoader(folder, dtype=torch.float32, kernels=name, num_threads=1)
    width, layers = loader.spec.width, range(loader.spec.num_layers)
    whole = loader.expert_stage()
    first = loader.expert_stage([[0, 4], [1, 4], []])
    second = loader.expert_stage([[1, 2, 3, 5], [0, 2, 3, 5], range(NUM_EXPERTS - 1)])
    second.add(2, loader.expert_bank(2, [NUM_EXPERTS - 1]), [NUM_EXPERTS - 1])
    for layer in layers:
        if not loader.spec.layers[layer].is_sparse:
            assert not whole.held(layer), f"layer {layer} is dense"
            continue
        assert whole.held(layer) == frozenset(range(NUM_EXPERTS)), f"layer {layer}"
        want_TD = whole.layer(layer).total(*rows(width))
        total_TD = part_of(second, layer, width) + part_of(first, layer, width)
        assert total_TD.dtype == torch.float64, f"parts are {total_TD.dtype}"
        assert torch.equal(total_TD.float(), want_TD), f"{name}, layer {layer}: parts differ"


@pytest.mark.parametrize("name", KERNEL_SETS)
def test_takeovers_come_and_go(folder: Path, name: KernelsName) -> None:
    loader = ModelLoader(folder, dtype=torch.float32, kernels=name, num_threads=1)
    whole = loader.expert_stage()
    stage = loader.expert_stage([[1, 3], [], [0]])
    x_TD, ids_TK, weights_TK = rows(loader.spec.width)
    want_TD = whole.layer(0).total(x_TD, ids_TK, weights_TK)
    alone_TD = stage.partial(0, x_TD, only(ids_TK, {1, 3}), weights_TK)
    stage.add(0, loader.expert_bank(0, [0, 5]), [0, 5])
    stage.add(0, loader.expert_bank(0, [4]), [4])
    with pytest.raises(AssertionError, match=r"experts \[2\], which are not here"):
        stage.layer(0).total(x_TD, ids_TK, weights_TK)
    with pytest.raises(AssertionError, match=r"experts \[1, 4\] are held already"):
        stage.add(0, loader.expert_bank(0, [1, 2, 4]), [1, 2, 4])
    stage.add(0, loader.expert_bank(0, [2]), [2])
    assert stage.held(0) == frozenset(range(NUM_EXPERTS)), f"holds {sorted(stage.held(0))}"
    assert torch.equal(stage.layer(0).total(x_TD, ids_TK, weights_TK), want_TD), name
    stage.drop_added()
    assert (stage.held(0), stage.held(2)) == (frozenset({1, 3}), frozenset({0}))
    again_TD = stage.partial(0, x_TD, only(ids_TK, {1, 3}), weights_TK)
    assert torch.equal(again_TD, alone_TD), f"{name}: dropping changed what was there before"


def test_a_layer_without_experts_here_adds_nothing(folder: Path) -> None:
    loader = ModelLoader(folder, dtype=torch.float32, kernels="torch")
    stage = loader.expert_stage([[], [], [2]])
    x_TD, ids_TK, weights_TK = rows(loader.spec.width)
    out_TD = stage.partial(0, x_TD, torch.full_like(ids_TK, -1), weights_TK)
    assert not out_TD.any() and out_TD.shape == x_TD.shape, f"{out_TD.shape}"
    with pytest.raises(AssertionError, match="which are not here"):
        stage.partial(0, x_TD, ids_TK, weights_TK)


def test_each_stage_reads_its_own_tensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int | None]] = []
    view = Checkpoint.view

    def recording(self: Checkpoint, name: str, index: int | None = None) -> Tensor:
        read.append((name, index))
        return view(self, name, index)

    monkeypatch.setattr(Checkpoint, "view", recording)
    loader = ModelLoader(folder, dtype=torch.float32, kernels="torch")
    loader.expert_stage([[1, 3], [], [0]])
    strangers = [name for name, _ in read if ".experts." not in name]
    assert not strangers, f"loading experts read {strangers}"
    held = {_layer_and_expert(*item) for item in read}
    assert held == {(0, 1), (0, 3), (2, 0)}, f"read {sorted(held)}"
    read.clear()
    loader.attention_stage(64)
    strangers = [name for name, _ in read if ".experts." in name]
    assert read and not strangers, f"loading attention read {strangers}"


def _layer_and_expert(name: str, index: int | None) -> tuple[int, int]:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0], numbers[1] if index is None else index


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
def test_no_memory_is_reserved_for_experts_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    empty = NativeLibrary.empty_packed

    def recording(self: NativeLibrary, *sizes: int) -> Tensor:
        counts.append(sizes[0])
        return empty(self, *sizes)

    monkeypatch.setattr(NativeLibrary, "empty_packed", recording)
    loader = ModelLoader(folder, dtype=torch.float32, kernels="native", num_threads=1)
    loader.expert_stage([[1, 3], [], [0, 2, 4]])
    assert counts == [2, 3], f"memory for {counts} experts"
