"""Linears, norms and the router: against torch in float64, and row by row, for every set."""

from __future__ import annotations

import pytest
import torch
from kernel_sets import KERNEL_SETS, make_kernels

from moe_kernels.choice import KernelsName, choose_kernels
from moe_kernels.linear import PlainLinear, make_linear

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 31, 33, 64, 129, 500, 1000)


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(96, 256), (256, 96), (32, 64), (20, 40), (37, 50), (3, 7), (300, 1024), (64, 2048)],
)
def test_linear(name: KernelsName, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    x = torch.randn(1100, inputs, generator=generator).to(dtype)
    residual = torch.randn(1100, outputs, generator=generator).to(dtype)
    linear = make_kernels(name, dtype).linear(weight.clone(), bias)
    whole, added = linear(x), linear(x, residual)
    expected = x.double() @ weight.double().t() + bias.double()
    error = (whole - expected).abs().max().item() / expected.abs().max().item()
    assert error < TOLERANCE[dtype], f"{name}, {dtype}, {outputs=}, {inputs=}, {error=}"
    assert torch.equal(added, residual + whole), "the result is rounded, then added"
    for count in COUNTS:
        rows = slice(41, 41 + count)
        assert torch.equal(linear(x[rows]), whole[rows]), f"{name}, {dtype}, {count=}"
        assert torch.equal(linear(x[rows], residual[rows]), added[rows]), f"{name}, {count=}"


@pytest.mark.parametrize("kind", ["made", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(96, 256), (256, 96), (20, 40), (40, 1032), (64, 4096)]
)
def test_torch_linears_fuse_what_experts_need(
    kind: str, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    x = torch.randn(1100, inputs, generator=generator).to(dtype)
    linear = make_linear(weight.clone()) if kind == "made" else PlainLinear(weight)
    whole, silu = linear(x), linear.silu(x)
    times = linear.times(x, whole)
    for count in COUNTS:
        rows = slice(41, 41 + count)
        assert torch.equal(linear(x[rows]), whole[rows]), f"{kind}, {dtype}, {count=}"
        assert torch.equal(linear.silu(x[rows]), silu[rows]), f"{kind}, {dtype}, {count=}: silu"
        assert torch.equal(linear.times(x[rows], whole[rows]), times[rows]), f"{count=}: times"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 40, 256, 1000])
def test_rms_norm(name: KernelsName, dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = (3 * torch.randn(300, width, generator=generator)).to(dtype)
    weight = torch.rand(width, generator=generator).to(dtype)
    kernels = make_kernels(name, dtype)
    out = kernels.rms_norm(x, weight, 1e-5)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.allclose(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for rows in (slice(0, 1), slice(7, 12), slice(100, 299)):
        assert torch.equal(kernels.rms_norm(x[rows], weight, 1e-5), out[rows]), f"{name}, {rows}"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (32, 4), (60, 4), (128, 8), (5, 5)])
@pytest.mark.parametrize("is_renormalised", [False, True])
def test_route(
    name: KernelsName, dtype: torch.dtype, num_experts: int, top_k: int, is_renormalised: bool
) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    # A permutation in every row: no two logits are equal, so the choice is unique.
    order = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(200)])
    logits = (order / 4.0).to(dtype)
    kernels = make_kernels(name, dtype)
    ids, weights = kernels.route(logits, top_k, is_renormalised)
    probs = logits.double().softmax(-1)
    expected = probs.topk(top_k).indices.sort().values
    assert torch.equal(ids, expected)
    values = probs.gather(1, expected)
    if is_renormalised:
        values = values / values.sum(-1, keepdim=True)
    assert torch.allclose(weights.double(), values, rtol=1e-5, atol=1e-7)
    for rows in (slice(0, 1), slice(7, 12), slice(100, 199)):
        again = kernels.route(logits[rows], top_k, is_renormalised)
        assert torch.equal(again[0], ids[rows]) and torch.equal(again[1], weights[rows])


@pytest.mark.parametrize("name", KERNEL_SETS)
def test_a_row_of_nan_stays_alone(name: KernelsName) -> None:
    logits = torch.randn(4, 8)
    clean = make_kernels(name, torch.float32).route(logits, 2, True)
    spoiled = logits.clone()
    spoiled[2] = float("nan")
    ids, weights = make_kernels(name, torch.float32).route(spoiled, 2, True)
    assert ((ids >= 0) & (ids < 8)).all(), "ids stay inside the bank"
    assert weights[2].isnan().all()
    for row in (0, 1, 3):
        assert torch.equal(ids[row], clean[0][row]) and torch.equal(weights[row], clean[1][row])


def test_the_choice_says_why() -> None:
    cpu = torch.device("cpu")
    assert choose_kernels(cpu, torch.float32, "torch").name.startswith("torch (")
    assert "not for float16" in choose_kernels(cpu, torch.float16).name
    with pytest.raises(RuntimeError, match="native kernels cannot be used: .* not for float16"):
        choose_kernels(cpu, torch.float16, "native")
