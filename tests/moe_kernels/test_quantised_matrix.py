"""Matrices of few bits: their parts, their transpose, and copies in memory of their own."""

from __future__ import annotations

import pytest
import torch

from moe_kernels.interface.kernels import ExpertWeights, GatedActivation
from moe_kernels.interface.quantised_matrix import E4M3, UINT4
from moe_kernels.reference.expert_mlp import ExpertMLP, QuantisedMLP, made_mlp
from tests.support.kernels.quantised_matrices import KINDS, Kind


def id_of(kind: Kind) -> str:
    return kind.name


SHUFFLED = Kind(name="activation order", table=UINT4, group=32, has_zeros=True, is_shuffled=True)


@pytest.mark.parametrize("kind", (*KINDS, SHUFFLED), ids=id_of)
def test_rows_are_rows_of_the_floats(kind: Kind) -> None:
    matrix = kind.matrix(256, 96)
    floats = matrix.dequantised(torch.float32)
    for wanted in (slice(None, 128), slice(128, None), slice(1, None, 2)):
        found = matrix.rows(wanted).dequantised(torch.float32)
        assert torch.equal(found, floats[wanted]), f"{kind.name}: {wanted}"


@pytest.mark.parametrize("kind", KINDS, ids=id_of)
def test_turned_over(kind: Kind) -> None:
    matrix = kind.matrix(200, 300)
    can_be = kind.table.num_values == 1 and kind.block_rows != 1
    assert (matrix.form.transposed() is not None) == can_be, kind.form
    if can_be:
        found = matrix.transposed()
        assert found.form.is_transposed and found.shape == (300, 200), found.form
        floats = matrix.dequantised(torch.float32)
        assert torch.equal(found.dequantised(torch.float32), floats.t()), kind.name
        assert found.transposed().form == matrix.form, "twice is not at all"


def test_blocks_are_turned_over_too() -> None:
    form = Kind(name="", table=E4M3, group=64, block_rows=128).form.transposed()
    assert form is not None and (form.group, form.block_rows) == (128, 64), form


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_quantised_mlp_has_the_bits_of_its_floats(dtype: torch.dtype) -> None:
    """It keeps copies, so later changes of its source matrices do not affect it."""
    matrices = [SHUFFLED.matrix(*shape, i) for i, shape in enumerate([(64, 96)] * 2 + [(96, 64)])]
    weights = ExpertWeights(*matrices)
    floats = ExpertMLP.from_weights(weights, GatedActivation(), dtype)
    mlp = made_mlp(weights, GatedActivation())
    assert isinstance(mlp, QuantisedMLP), type(mlp)
    for matrix in matrices:
        matrix.bytes_NB.zero_()
    x_TD = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(mlp(x_TD), floats(x_TD)), f"{dtype}"


def test_the_form_is_named() -> None:
    names = {kind.name: kind.form.name for kind in KINDS}
    assert names["fp8 blocks"] == "e4m3 blocks of 128x128", names
    assert names["awq"] == "int4 groups of 64 with zeros", names
    assert names["int4 matrix"] == "int4 matrices", names
