"""Compares every case of every family with transformers, with every kernel set."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_kernels.kernel_choice import KernelsName
from tests.support.cluster.layouts import colocated, config, on_ranks, requests
from tests.support.families.all_cases import CASES
from tests.support.families.case import VOCAB_SIZE
from tests.support.families.parity import (
    check_greedy_tokens,
    check_invariance,
    check_logits,
    write_checkpoint,
)
from tests.support.kernels.kernel_sets import KERNEL_SETS


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), CASES[request.param])


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_logits(folder: Path, kernels: KernelsName) -> None:
    check_logits(folder, kernels)


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_greedy_tokens(folder: Path, kernels: KernelsName) -> None:
    check_greedy_tokens(folder, kernels)


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_invariance(folder: Path, kernels: KernelsName) -> None:
    check_invariance(folder, kernels)


def test_ranks(folder: Path) -> None:
    """Two attention and three expert ranks give what one process gives, bit for bit, in bf16."""
    of = config(2, 3, 2, folder=folder, dtype="bfloat16", budget=40)
    wanted = requests(4, VOCAB_SIZE, num_tokens=2)
    assert on_ranks(of, wanted) == colocated(of, wanted), folder.name
