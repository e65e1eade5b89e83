"""A value of a product does not depend on the columns beside it, so shards may divide them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels.interface.kernels import ExpertWeights, GatedActivation
from tests.support.kernels.kernel_sets import KERNEL_SETS, make_kernels

pytestmark = list(KERNEL_SETS[1].marks)  # the native kernels: the others refuse

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
WIDTHS = st.integers(1, 150)


def tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    dtype=DTYPES, rows=st.integers(1, 40), inputs=WIDTHS, outputs=st.integers(2, 200),
    data=st.data(), has_bias=st.booleans(), has_residual=st.booleans(),
)  # fmt: skip
def test_linear(
    dtype: torch.dtype,
    rows: int,
    inputs: int,
    outputs: int,
    data: st.DataObject,
    has_bias: bool,
    has_residual: bool,
) -> None:
    kernels = make_kernels("native", dtype)
    start = data.draw(st.integers(0, outputs - 1))
    end = data.draw(st.integers(start + 1, outputs))
    x, weight = tensor(0, rows, inputs).to(dtype), tensor(1, outputs, inputs).to(dtype)
    bias = tensor(2, outputs).to(dtype) if has_bias else None
    residual = tensor(3, rows, outputs).to(dtype) if has_residual else None
    whole = kernels.linear(weight, bias)(x, residual)
    part = kernels.linear(weight[start:end], None if bias is None else bias[start:end])
    own = None if residual is None else residual[:, start:end].contiguous()
    assert torch.equal(part(x, own), whole[:, start:end]), f"columns {start} to {end}"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    dtype=DTYPES, rows=st.integers(1, 40), width=st.integers(2, 120), hidden=st.integers(2, 120),
    data=st.data(), has_bias=st.booleans(), is_gpt_oss=st.booleans(),
)  # fmt: skip
def test_mlp(
    dtype: torch.dtype,
    rows: int,
    width: int,
    hidden: int,
    data: st.DataObject,
    has_bias: bool,
    is_gpt_oss: bool,
) -> None:
    kernels = make_kernels("native", dtype)
    activation = GatedActivation(alpha=1.702, limit=2.0, up_offset=1.0)
    activation = activation if is_gpt_oss else GatedActivation()
    gate, up = tensor(0, hidden, width).to(dtype), tensor(1, hidden, width).to(dtype)
    down, x = tensor(2, width, hidden).to(dtype), tensor(3, rows, width).to(dtype)
    biases = [tensor(4 + i, n).to(dtype) for i, n in enumerate((hidden, hidden, width))]
    weights = tensor(9, rows, 1)
    whole = ExpertWeights(gate, up, down, *(biases if has_bias else ()))
    ids = torch.zeros(rows, 1, dtype=torch.int64)
    expected = kernels.experts([whole], activation)(x, ids, weights)

    middle = data.draw(st.integers(1, hidden - 1)), data.draw(st.integers(1, width - 1))
    parts = []
    for a, b in ((slice(0, middle[0]), slice(0, middle[1])),
                 (slice(middle[0], None), slice(middle[1], None))):  # fmt: skip
        own = (biases[0][a], biases[1][a], biases[2][b]) if has_bias else ()
        parts.append(kernels.split_mlp(ExpertWeights(gate[a], up[a], down[b], *own), activation))
    hidden_TF = torch.cat([part.hidden(x) for part in parts], dim=1)
    found = torch.cat([part.output(hidden_TF, weights) for part in parts], dim=1)
    assert torch.equal(found, expected), f"cut at {middle} of {(hidden, width)}"
