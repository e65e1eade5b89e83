"""Quantised checkpoints have bit for bit the logits of the same weights stored in floats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_kernels.kernel_choice import KernelsName
from moe_serve.config.sections import WeightsName
from moe_serve.errors import ConfigError
from moe_serve.model.load.loader import ModelLoader
from tests.support.families.parity import model_logits, random_prompts
from tests.support.families.quantised_cases import CASES
from tests.support.families.quantised_folder import QuantisedCase, write_pair
from tests.support.kernels.kernel_sets import KERNEL_SETS

WAYS_TO_HOLD: tuple[WeightsName, ...] = ("dequantised", "packed")
_DTYPES: dict[str, torch.dtype] = {"torch": torch.float32, "native": torch.bfloat16}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> QuantisedCase:
    return CASES[request.param]


@pytest.fixture(scope="module")
def pair(case: QuantisedCase, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), case)


def test_packed_experts_have_the_same_logits(case: QuantisedCase, pair: tuple[Path, Path]) -> None:
    """The torch set then dequantises in every call, not while loading."""
    if case is CASES["Qwen3-VL-30B-A3B-FP8"]:  # tiny: a block of both gate and up
        with pytest.raises(ConfigError, match="128x128 with blocks that gate and up share; use"):
            ModelLoader(pair[0], kernels="torch", expert_weights="packed")
        return
    (prompt,) = random_prompts((6,))
    floats, packed = (
        model_logits(pair[0], "torch", prompt, 6, torch.bfloat16, expert_weights)
        for expert_weights in WAYS_TO_HOLD
    )
    assert torch.equal(floats, packed), f"{(floats - packed).abs().max()=}"
    description = ModelLoader(pair[0], kernels="torch", expert_weights="auto").expert_weights
    assert description.startswith("dequantised to"), description


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_logits(pair: tuple[Path, Path], kernels: KernelsName) -> None:
    """Each set of kernels runs in one dtype, because loading does not depend on the kernels."""
    (prompt,) = random_prompts((24,))
    dtype = _DTYPES[kernels]
    stored, plain = (model_logits(folder, kernels, prompt, 24, dtype) for folder in pair)
    assert stored.isfinite().all(), f"{kernels}, {dtype}: not finite"
    assert torch.equal(stored, plain), f"{kernels}, {dtype}, {(stored - plain).abs().max()=}"


def test_the_format_is_named(case: QuantisedCase, pair: tuple[Path, Path]) -> None:
    names = [ModelLoader(folder).weight_format for folder in pair]
    assert names == [case.format_name, "plain"]
