"""The grouped products against the definition in float64, and equal bits of a row in any batch.

T rows, K choices, E experts, D model width, F expert width. One metric: the largest difference over
the largest value of the reference.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_kernels.gpu.grouped_gemm.api import Chip, grouped_experts, has_equal_tiles
from moe_kernels.gpu.grouped_gemm.experts import GroupedExperts
from moe_kernels.gpu.grouped_gemm.heuristics import BLOCK_MS, PACKED_FORMATS, WeightFormat
from moe_kernels.gpu.grouped_gemm.pack import GroupedWeight, quantised
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation
from moe_kernels.reference.expert_mlp import routed_experts_reference
from tests.support.kernels.kernel_sets import ids_of

TOLERANCES = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
FORMATS: tuple[tuple[WeightFormat, int], ...] = (
    ("plain", 0),
    ("int8", 0),
    ("fp8_channel", 0),
    ("fp8_block", 128),
    ("int4", 32),
    ("int4", 64),
    ("int4", 128),
    ("int4_zero", 32),
    ("int4_zero", 128),
    ("mxfp4", 32),
    ("int8_zero", 32),
    ("int8_zero", 128),
)
GPT_OSS = GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)
D, F = 136, 96  # off every tile


def chip_of(device: torch.device, capability: int = 90) -> Chip:
    """Returns a chip with fewer processors than pieces, so that the persistent kernel loops."""
    is_gpu = device.type == "cuda"
    if is_gpu:
        major, minor = torch.cuda.get_device_capability(device)
        capability = major * 10 + minor
    has_fp8 = is_gpu and capability >= 89
    return Chip(capability=capability, num_processors=3, has_equal_tiles=True, has_fp8=has_fp8)


def experts_of(
    dtype: torch.dtype,
    device: torch.device,
    num_experts: int,
    weight_format: WeightFormat = "plain",
    group: int = 0,
    activation: GatedActivation | None = None,
    sizes: tuple[int, int] = (D, F),
) -> GroupedExperts:
    """Returns random experts, with biases if an activation is given."""
    generator = torch.Generator().manual_seed(3)
    width, expert_width = sizes

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    gate_up = normal(num_experts, 2 * expert_width, width, scale=3 * width**-0.5)
    down = normal(num_experts, width, expert_width, scale=expert_width**-0.5)
    has_bias = activation is not None
    return GroupedExperts(
        gate_up=quantised(gate_up, weight_format, group, 2),
        down=quantised(down, weight_format, group, 1),
        activation=activation or GatedActivation(),
        gate_up_bias=normal(num_experts, 2 * expert_width, scale=2.0) if has_bias else None,
        down_bias=normal(num_experts, width, scale=1.0) if has_bias else None,
    )


def inputs_of(
    dtype: torch.dtype, device: torch.device, ids_TK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x [T, D], ids and weights [T, K]."""
    generator = torch.Generator().manual_seed(4)
    x_TD = torch.randn(len(ids_TK), D, generator=generator).to(device, dtype)
    weights_TK = torch.rand(ids_TK.shape, generator=generator).to(device)
    return x_TD, ids_TK.to(device), weights_TK


def reference(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: GroupedExperts) -> Tensor:
    """Computes the products in float64 on the host; choices of experts that are not here add
    nothing."""
    x, ids, weights = (t.cpu() for t in (x_TD, ids_TK, weights_TK))
    is_here = (ids >= 0) & (ids < experts.num_experts)
    ids, weights = torch.where(is_here, ids, 0), torch.where(is_here, weights, 0.0)
    gate_up, down = (_floats(w, x.dtype) for w in (experts.gate_up, experts.down))
    expert_width = experts.expert_width
    parts = []
    for e in range(experts.num_experts):
        biases: tuple[Tensor | None, ...] = (None, None, None)
        if experts.gate_up_bias is not None and experts.down_bias is not None:
            bias = experts.gate_up_bias[e].cpu()
            biases = (bias[:expert_width], bias[expert_width:], experts.down_bias[e].cpu())
        gate, up = gate_up[e].split(expert_width)
        parts.append(ExpertWeights(gate, up, down[e], *biases))
    return routed_experts_reference(x, ids, weights, parts, experts.activation)


def _floats(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Returns the weights as the kernel multiplies them: with groups, rounded to the model's
    dtype."""
    floats = weight.dequantised().cpu()
    has_groups = weight.weight_format in (*PACKED_FORMATS, "int8_zero")
    return floats.to(dtype) if has_groups else floats


def check(found_TD: Tensor, want_TD: Tensor, dtype: torch.dtype, case: str) -> None:
    assert found_TD.dtype == torch.float32, f"{case}: {found_TD.dtype}"
    largest = want_TD.abs().max().clamp(min=1e-3)  # all choices may be elsewhere
    error = ((found_TD.cpu() - want_TD).abs().max() / largest).item()
    assert error < TOLERANCES[dtype], f"{case}: error {error:.2e}, {TOLERANCES[dtype]:.0e} allowed"


@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_experts", "block_m", "routing"),
    [
        (1, 1, 8, 16, "any"),
        (1, 8, 8, 16, "one"),
        (2, 3, 5, 64, "elsewhere"),
        (3, 5, 6, 16, "few"),
        (20, 1, 3, 16, "one"),
        (20, 2, 6, 16, "few"),
        (17, 2, 4, 64, "any"),
        (40, 4, 4, 128, "one"),
        (40, 1, 4, 128, "elsewhere"),
        (1, 2, 8, 64, "elsewhere"),
    ],
)
def test_equals_the_definition(
    num_rows: int, top_k: int, num_experts: int, block_m: int, routing: str, device: torch.device
) -> None:
    """Cases: empty experts, one row, all rows to the same experts, experts elsewhere, ragged
    tiles."""
    experts = experts_of(torch.float32, device, num_experts)
    inputs = inputs_of(torch.float32, device, ids_of(num_rows, top_k, num_experts, routing))
    found = grouped_experts(*inputs, experts, chip_of(device), block_m)
    case = f"T={num_rows} K={top_k} E={num_experts} M={block_m} {routing}"
    check(found, reference(*inputs, experts), torch.float32, case)


@pytest.mark.parametrize(
    ("weight_format", "group", "dtype"),
    [(*each, torch.bfloat16) for each in FORMATS]
    + [(*each, dtype) for each in FORMATS[::3] for dtype in (torch.float16, torch.float32)],
)
def test_every_format_and_dtype(
    weight_format: WeightFormat, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    experts = experts_of(dtype, device, 2, weight_format, group)
    inputs = inputs_of(dtype, device, ids_of(5, 1, 2, "any"))
    found = grouped_experts(*inputs, experts, chip_of(device), 16)
    check(found, reference(*inputs, experts), dtype, f"{weight_format} {group} {dtype}")


@pytest.mark.parametrize("block_m", BLOCK_MS)
@pytest.mark.parametrize("weight_format", ["plain", "mxfp4"])
def test_biases_and_the_clamped_activation(
    weight_format: WeightFormat, block_m: int, device: torch.device
) -> None:
    group = 32 if weight_format == "mxfp4" else 0
    experts = experts_of(torch.float32, device, 2, weight_format, group, GPT_OSS)
    inputs = inputs_of(torch.float32, device, ids_of(4, 2, 2, "any"))
    found = grouped_experts(*inputs, experts, chip_of(device), block_m)
    check(found, reference(*inputs, experts), torch.float32, f"{weight_format} M={block_m}")


@pytest.mark.usefixtures("rows_are_alike")
@pytest.mark.parametrize(
    ("weight_format", "group", "dtype"),
    [("plain", 0, torch.float32), ("plain", 0, torch.bfloat16), ("fp8_block", 128, torch.float32),
     ("int8", 0, torch.float32), ("int4_zero", 128, torch.float32), ("mxfp4", 32, torch.float32),
     ("int8_zero", 64, torch.float32)],
)  # fmt: skip
def test_a_row_has_the_same_bits_alone_and_in_tiles_of_every_size(
    weight_format: WeightFormat, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    """20 rows in tiles of 16 (a full one), 64 and 128 (TMA where the format allows); single rows as
    direct. The persistent kernel has one processor, and so loops.

    On a GPU only the first is promised: there `has_equal_tiles` reports if the sizes agree.
    """
    experts = experts_of(dtype, device, 2, weight_format, group)
    x, ids, weights = inputs_of(dtype, device, torch.tensor([0] * 2 + [1] * 18)[:, None])
    chip = replace(chip_of(device), num_processors=1)
    batch = grouped_experts(x, ids, weights, experts, chip, 16)
    for t in (0, 19):
        row = slice(t, t + 1)
        alone = grouped_experts(x[row], ids[row], weights[row], experts, chip, 16)
        assert torch.equal(alone[0], batch[t]), f"{weight_format}: row {t} alone differs"
    for block_m, capability in ((64, 90), (128, 90), (128, 80)) if device.type == "cpu" else ():
        chip = replace(chip_of(device, capability), num_processors=1)
        other = grouped_experts(x, ids, weights, experts, chip, block_m)
        assert torch.equal(batch, other), f"{weight_format}: tiles of 16 and {block_m} differ"


def test_the_tile_is_fixed_where_sizes_were_not_found_equal(device: torch.device) -> None:
    experts = experts_of(torch.float32, device, 4)
    inputs = inputs_of(torch.float32, device, ids_of(5, 2, 4, "any"))
    chip = chip_of(device)
    fixed = Chip(
        capability=chip.capability, num_processors=3, has_equal_tiles=False, has_fp8=chip.has_fp8
    )
    found = grouped_experts(*inputs, experts, fixed)
    assert torch.equal(found, grouped_experts(*inputs, experts, chip, 64)), "not the tile of 64"


@pytest.mark.usefixtures("rows_are_alike")
def test_self_check_runs_every_size(device: torch.device) -> None:
    experts = experts_of(torch.float32, device, 3, sizes=(32, 64))
    is_equal = has_equal_tiles(experts, torch.float32, chip_of(device))
    assert is_equal or device.type == "cuda", "sizes differ"


def test_no_rows_give_no_rows(device: torch.device) -> None:
    experts = experts_of(torch.float32, device, 4)
    x, ids, weights = inputs_of(torch.float32, device, torch.empty(0, 2, dtype=torch.int64))
    assert grouped_experts(x, ids, weights, experts, chip_of(device)).shape == (0, D)


def test_a_row_of_choices_that_are_elsewhere_is_zero(device: torch.device) -> None:
    experts = experts_of(torch.float32, device, 4)
    ids = torch.tensor([[-1, 9], [0, 1]])
    found = grouped_experts(
        *inputs_of(torch.float32, device, ids), experts, chip_of(device), BLOCK_MS[0]
    )
    assert (found[0] == 0.0).all() and (found[1] != 0.0).any(), found


@pytest.mark.parametrize("part", ["gate", "up"])
def test_a_nan_in_the_weights_shows_through_the_limits(device: torch.device, part: str) -> None:
    """A NaN that was limited to 7 would give a wrong answer without an error; the other sets keep
    it too."""
    experts = experts_of(torch.float32, device, 4, activation=GPT_OSS)
    row = 5 if part == "gate" else experts.expert_width + 5
    experts.gate_up.values.view(4, 2 * F, D)[2, row, 7] = float("nan")
    ids_TK = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    out_TD = grouped_experts(*inputs_of(torch.float32, device, ids_TK), experts, chip_of(device))
    assert out_TD[1:3].isnan().all(), "rows of expert 2"
    assert out_TD[[0, 3]].isfinite().all(), "rows of the others"
