"""The Triton set against the torch set: whole tiny models, from a checkpoint to logits.

The models are small because the interpreter is slow: each case takes seconds.
"""

from __future__ import annotations

import importlib.util
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from moe_kernels.gpu.grouped_gemm.grouped_linear import RowTiles, checked_rows, has_equal_tiles
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation
from moe_kernels.kernel_choice import KernelsName, choose_kernels
from moe_kernels.reference.expert_mlp import routed_experts_reference
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.transport import LocalTransport
from tests.support.families.case import TINY, VOCAB_SIZE, Case
from tests.support.families.parity import write_checkpoint

SMALL = TINY | {"hidden_size": 32, "num_hidden_layers": 2}
SWIGLU = GatedActivation()
CASES = {
    "qwen3_moe": Case(
        transformers.Qwen3MoeConfig(
            **SMALL, head_dim=16, intermediate_size=48, moe_intermediate_size=24, num_experts=4
        )
    ),
    "gpt_oss": Case(  # sinks, windows, biases everywhere, the clamped activation
        transformers.GptOssConfig(
            **SMALL, head_dim=16, intermediate_size=24, num_local_experts=4, sliding_window=8
        )
    ),
    "deepseek_v3": Case(  # latent attention, sigmoid router with groups, a shared expert
        transformers.DeepseekV3Config(
            **SMALL | {"num_key_value_heads": 4},
            q_lora_rank=20,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
            intermediate_size=40,
            moe_intermediate_size=24,
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
        )
    ),
}
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2e-2, "atol": 5e-2},  # the sum and the residual's are rounded
}
TOKENS = np.random.default_rng(5).integers(1, VOCAB_SIZE, 22)
WHOLE = (15, 1, 1)  # lengths of the steps; the third begins a page
CHUNKED = (12, 7, 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_checkpoint(root / name, case) for name, case in CASES.items()}


@cache
def logits(
    folder: Path, kernels: KernelsName, steps: tuple[int, ...], device: torch.device
) -> Tensor:
    """Returns the logits of all tokens in fp32, fed in steps of these lengths."""
    loader = ModelLoader(folder, kernels=kernels, dtype=torch.float32, device=device)
    assert loader.kernels.name.startswith(kernels), f"{loader.kernels.name}, not {kernels}"
    cache = KVCache(loader.spec, 5, 16, torch.float32, device)
    stage = loader.attention_stage(64)
    pipeline = Pipeline(stage, LocalTransport(loader.expert_stage()), cache, device)
    parts, start = [], 0
    for length in steps:
        ids = TOKENS[start : start + length]
        piece = SequenceSlice(0, start, ids, (4, 2), length)
        parts.append(pipeline.run(StepPlan((MicroBatch((piece,)),))).cpu())
        start += length
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("qwen3_moe", WHOLE),
        ("qwen3_moe", CHUNKED),
        ("gpt_oss", CHUNKED),
        ("deepseek_v3", CHUNKED),
    ],
)
def test_a_model_has_the_logits_of_the_torch_set(
    folders: dict[str, Path], name: str, steps: tuple[int, ...], device: torch.device
) -> None:
    expected = logits(folders[name], "torch", (sum(steps),), device)
    error = (logits(folders[name], "triton", steps, device) - expected).abs().max()
    error /= expected.abs().max()
    assert error < 1e-4, f"{name}, steps of {steps}: {error=:.2e}"


def weight_of(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 70])
def test_linear(num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    kernels = choose_kernels(device, dtype, "triton")
    weight, x = (weight_of(n, 50, dtype=dtype, device=device) for n in (130, num_rows))
    bias, residual = (weight_of(*n, 130, dtype=dtype, device=device) for n in ((), (num_rows,)))
    out = kernels.linear(weight, bias)(x, residual)
    want = residual.double() + (x.double() @ weight.double().T + bias.double())
    assert out.dtype == dtype, f"out is {out.dtype}"
    torch.testing.assert_close(out.double(), want, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 70])
def test_head_linear(num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    kernels = choose_kernels(device, dtype, "triton")
    weight_HNC = weight_of(3, 20, 24, dtype=dtype, device=device)
    x_THC = weight_of(num_rows, 3, 40, dtype=dtype, device=device)[..., 8:32]
    out_THN = kernels.head_linear(weight_HNC)(x_THC)
    want = torch.einsum("thc,hnc->thn", x_THC.double(), weight_HNC.double())
    assert out_THN.is_contiguous() and out_THN.dtype == dtype, f"{out_THN.dtype}"
    torch.testing.assert_close(out_THN.double(), want, **TOLERANCES[dtype])


@pytest.mark.parametrize("is_exact", [True, False])
def test_router_logits_are_not_rounded(is_exact: bool, device: torch.device) -> None:
    """The router's weight may be one that bf16 holds exactly, or not."""
    kernels = choose_kernels(device, torch.bfloat16, "triton")
    dtype = torch.bfloat16 if is_exact else torch.float32
    weight_ED = weight_of(12, 64, dtype=dtype, device=device).float()
    bias_E = weight_of(12, dtype=torch.float32, device=device)
    x_TD = weight_of(5, 64, dtype=torch.bfloat16, device=device)
    logits_TE = kernels.router_linear(weight_ED, bias_E)(x_TD)
    want = x_TD.double() @ weight_ED.double().T + bias_E.double()
    assert logits_TE.dtype == torch.float32, f"logits are {logits_TE.dtype}"
    torch.testing.assert_close(logits_TE.double(), want, rtol=1e-5, atol=1e-5)


def test_experts_that_live_elsewhere_add_nothing(device: torch.device) -> None:
    """Rows choose from all experts of the model; only two of them are here."""
    kernels = choose_kernels(device, torch.float32, "triton")

    def expert(seed: int) -> ExpertWeights:
        gate_up = weight_of(48, 16 + seed, dtype=torch.float32, device=device)[:, :16]
        down = weight_of(16 + seed, 24, dtype=torch.float32, device=device)[:16]
        return ExpertWeights(gate_up[:24], gate_up[24:], down)

    here = {1: expert(1), 3: expert(2)}
    ids_TK = torch.tensor([[0, 1], [1, 3], [2, 4], [3, 4]], device=device)
    weights_TK = torch.rand(4, 2, generator=torch.Generator().manual_seed(1)).to(device)
    x_TD = weight_of(4, 16, dtype=torch.float32, device=device)
    bank = kernels.experts([here.get(e) for e in range(5)], SWIGLU)
    is_here = (ids_TK == 1) | (ids_TK == 3)
    want_TD = routed_experts_reference(
        x_TD.cpu(),
        torch.where(is_here, ids_TK, 1).cpu(),
        torch.where(is_here, weights_TK, 0.0).cpu(),
        [ExpertWeights(w.gate.cpu(), w.up.cpu(), w.down.cpu())
         for w in (here[3 if e == 3 else 1] for e in range(5))],
    )  # fmt: skip
    found_TD = bank(x_TD, ids_TK, weights_TK).cpu()
    torch.testing.assert_close(found_TD.double(), want_TD, rtol=1e-4, atol=1e-4)
    others = kernels.experts([None if e in here else expert(3) for e in range(5)], SWIGLU)
    whole = kernels.experts([here.get(e) or expert(3) for e in range(5)], SWIGLU)
    parts = [
        each.partial(x_TD, torch.where(mask, ids_TK, -1), weights_TK)
        for each, mask in ((others, ~is_here), (bank, is_here))
    ]
    assert parts[0].dtype == torch.float64, f"a partial sum is {parts[0].dtype}"
    whole_TD = whole(x_TD, ids_TK, weights_TK)
    assert torch.equal((parts[0] + parts[1]).float(), whole_TD), "two banks are not as one"
    assert torch.equal((parts[1] + parts[0]).float(), whole_TD), "the order of banks shows"


def test_a_larger_batch_than_the_tables_hold(device: torch.device) -> None:
    tiles = RowTiles(device, num_rows=32)
    for num_rows, block_m in ((5, 16), (32, 64), (200, 16), (3, 128)):
        found = tiles.of_rows(num_rows, block_m)
        num_tiles = -(-num_rows // block_m)
        assert found.num_tiles is not None and found.sorted_slots is not None, "made of tables"
        assert found.num_tiles.tolist() == [num_tiles], f"{num_rows} rows in {block_m}s"
        assert found.sorted_slots.tolist() == list(range(num_tiles * block_m)), f"{num_rows} rows"


def test_tables_that_were_outgrown_are_kept(device: torch.device) -> None:
    """A CUDA graph may still read them."""
    tiles = RowTiles(device, num_rows=32)
    before = weakref.ref(tiles.of_rows(32, 16).sorted_slots)
    held = weakref.ref(tiles._numbers)
    tiles.of_rows(200, 16)
    assert before() is None and held() is not None, "the table itself outlives the alignment"


def test_the_slots_of_heads(device: torch.device) -> None:
    found = RowTiles(device, num_rows=32).of_heads(3, 2, 2)
    assert found.sorted_slots is not None and found.num_tiles is not None, "made of tables"
    assert found.sorted_slots.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert found.tile_experts.tolist() == [0, 0, 1, 1]
    assert (found.num_tiles.tolist(), found.num_slots) == ([4], 6)


@pytest.mark.parametrize("make", ["linear", "head_linear"])
def test_linears_are_asked_whether_tiles_are_alike(make: str, device: torch.device) -> None:
    """Only a real chip gives an answer; here every size of tile runs, and the setting is
    restored."""
    kernels = choose_kernels(device, torch.float32, "triton")
    widths = (3, 16) if make == "head_linear" else (16,)
    weight = weight_of(*widths[:-1], 20, 16, dtype=torch.float32, device=device)
    layer = getattr(kernels, make)(weight)
    chip = layer.chip
    rows = checked_rows(*widths, dtype=torch.float32, device=device)
    assert has_equal_tiles(layer, rows) in (True, False)
    assert layer.chip is chip, "the layer keeps its chip"


def test_the_set_is_chosen_for_a_gpu_and_named(device: torch.device) -> None:
    name = choose_kernels(device, torch.bfloat16, "triton").name
    assert name.startswith("triton 3.") and "attention: triton" in name, name
    is_auto = choose_kernels(device, torch.bfloat16).name.startswith("triton")
    assert is_auto == (device.type == "cuda"), "auto takes triton on a GPU alone"


def test_the_set_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu = torch.device("cpu")
    with pytest.raises(RuntimeError, match="for CUDA GPUs, not for cpu"):
        choose_kernels(cpu, torch.bfloat16, "triton")
    with pytest.raises(RuntimeError, match="not for float64"):
        choose_kernels(cpu, torch.float64, "triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="triton is not installed"):
        choose_kernels(cpu, torch.bfloat16, "triton")
    kernels = choose_kernels(torch.device("cuda"), torch.bfloat16)
    assert "torch" in kernels.name and "triton is not installed" in kernels.name, kernels.name
