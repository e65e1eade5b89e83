"""Linears and norms: against torch in float64, and row by row, for every set."""

from __future__ import annotations

import pytest
import torch

from moe_kernels.kernel_choice import KernelsName, choose_kernels
from moe_kernels.reference.linear import PlainLinear, make_linear
from tests.support.kernels.kernel_sets import KERNEL_SETS, make_kernels

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 31, 33, 64, 129, 500)  # beside the whole of 1100


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


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(3, 64, 48), (16, 128, 512), (5, 20, 37)])
def test_head_linear(
    name: KernelsName, dtype: torch.dtype, heads: int, outputs: int, inputs: int
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = (torch.randn(heads, outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    wide = torch.randn(200, heads, inputs + 16, generator=generator).to(dtype)
    x = wide[..., 16:]  # as the first part of a head's query is handed over
    linear = make_kernels(name, dtype).head_linear(weight)
    whole = linear(x)
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    error = (whole - expected).abs().max().item() / expected.abs().max().item()
    assert error < TOLERANCE[dtype], f"{name}, {dtype}, {heads=}, {outputs=}, {inputs=}, {error=}"
    assert whole.is_contiguous() and whole.dtype == dtype
    for count in (1, 2, 5, 16, 100):
        rows = slice(41, 41 + count)
        assert torch.equal(linear(x[rows]), whole[rows]), f"{name}, {dtype}, {count=}"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("experts", "width"), [(8, 64), (60, 100), (256, 512), (5, 37)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_router_linear(
    name: KernelsName, dtype: torch.dtype, experts: int, width: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(experts)
    weight = torch.randn(experts, width, generator=generator).to(dtype)
    bias = torch.randn(experts, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(300, width, generator=generator).to(dtype)
    linear = make_kernels(name, dtype).router_linear(weight, bias)
    whole = linear(x)
    expected = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    error = (whole - expected).abs().max().item() / expected.abs().max().item()
    assert whole.dtype == torch.float32
    assert error < 1e-5, f"{name}, {dtype}, {experts=}, {width=}, {error=}: logits are fp32"
    for count in (1, 2, 5, 16, 100, 259):
        rows = slice(41, 41 + count)
        assert torch.equal(linear(x[rows]), whole[rows]), f"{name}, {dtype}, {count=}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_may_be_a_view(dtype: torch.dtype) -> None:
    """Checkpoints hold transposed and interleaved matrices; packing reads them in place."""
    both = torch.randn(64, 2 * 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = both[:, ::2].t()  # [40, 64], no stride is 1
    x = torch.randn(7, 64).to(dtype)
    kernels = choose_kernels(torch.device("cpu"), dtype)
    one, other = kernels.linear(weight), kernels.linear(weight.contiguous())
    assert torch.equal(one(x), other(x))


@pytest.mark.sampled
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


def test_the_choice_says_why() -> None:
    cpu = torch.device("cpu")
    assert choose_kernels(cpu, torch.float32, "torch").name.startswith("torch (")
    assert "not for float16" in choose_kernels(cpu, torch.float16).name
    with pytest.raises(RuntimeError, match="native kernels cannot be used: .* not for float16"):
        choose_kernels(cpu, torch.float16, "native")


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("width", [1, 15, 16, 33, 4096])
def test_largest(kernels: KernelsName, width: int) -> None:
    """The first of equal values wins, NaN wins over all, and rows without a finite value report
    it."""
    own = make_kernels(kernels, torch.float32)
    x = torch.randint(-3, 4, (9, width), generator=torch.Generator().manual_seed(width)).float()
    x[1] = float("-inf")
    x[2, width // 2], x[3, width - 1], x[4, 0] = float("nan"), float("inf"), float("nan")
    values, places = own.largest(x)
    assert [value != value for value in values] == [r in (2, 4) for r in range(9)]
    sound = [r for r in range(9) if r not in (2, 4)]
    assert [values[r] for r in sound] == x[sound].max(dim=-1).values.tolist()
    assert [places[r] for r in sound] == [int((x[r] == x[r].max()).nonzero()[0]) for r in sound]
