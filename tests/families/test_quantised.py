"""Quantised checkpoints give bit for bit the logits of the same weights stored in floats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_sets import KERNEL_SETS
from parity import model_logits, random_prompts
from quantised_cases import CASES
from quantised_folder import QuantisedCase, write_pair

from moe_kernels.choice import KernelsName
from moe_serve.model.loader import ModelLoader

_DTYPES: dict[str, torch.dtype] = {"torch": torch.float32, "native": torch.bfloat16}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> QuantisedCase:
    return CASES[request.param]


@pytest.fixture(scope="module")
def pair(case: QuantisedCase, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), case)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_logits(pair: tuple[Path, Path], kernels: KernelsName) -> None:
    """In one dtype for each set of kernels: loading knows nothing of the kernels."""
    (prompt,) = random_prompts((24,))
    dtype = _DTYPES[kernels]
    stored, plain = (model_logits(folder, kernels, prompt, 24, dtype) for folder in pair)
    assert stored.isfinite().all(), f"{kernels}, {dtype}: not finite"
    assert torch.equal(stored, plain), f"{kernels}, {dtype}, {(stored - plain).abs().max()=}"


def test_the_format_is_named(case: QuantisedCase, pair: tuple[Path, Path]) -> None:
    names = [ModelLoader(folder).weight_format for folder in pair]
    assert names == [case.format_name, "plain"]
