"""Norms and residual additions of rows. T rows of width D."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.gpu.rows.heuristics import row_config
from moe_kernels.gpu.rows.kernel import add_and_norm_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Addends:
    """The term added to the residual stream: multiplier (out + sigmoid(gate) more)."""

    out_TD: Tensor
    more_TD: Tensor | None = None
    gate_T: Tensor | None = None  # of `more`, such as a shared expert's
    multiplier: float = 1.0


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) rounded to x's dtype, times weight, over the last dimension."""
    x_TD = x.reshape(-1, x.shape[-1])
    return _launch(x_TD, None, weight_D, eps)[1].view(x.shape)


def add(hidden_TD: Tensor, addends: Addends) -> Tensor:
    """hidden + multiplier (out + more), rounded to hidden's dtype."""
    return _launch(hidden_TD, addends, None, 0.0)[0]


def add_and_norm(
    hidden_TD: Tensor, addends: Addends, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """-> the sum as `add` gives it, and its `rms_norm`; the sum is not read again."""
    return _launch(hidden_TD, addends, weight_D, eps)


def _launch(
    hidden_TD: Tensor, addends: Addends | None, weight_D: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    num_rows, width = hidden_TD.shape
    out_TD = more_TD = gate_T = None
    multiplier = 1.0
    if addends is not None:
        out_TD, more_TD, gate_T = addends.out_TD, addends.more_TD, addends.gate_T
        multiplier = addends.multiplier
    for name, rows in (("hidden", hidden_TD), ("out", out_TD), ("more", more_TD)):
        if rows is not None:
            assert rows.shape == hidden_TD.shape, f"{name} is {rows.shape}, not {hidden_TD.shape}"
            assert rows.stride(1) == 1, f"a row of {name} has stride {rows.stride(1)}"
    if gate_T is not None:
        assert more_TD is not None, "a gate needs something to gate"
        assert gate_T.numel() == num_rows and gate_T.is_contiguous(), f"gate is {gate_T.shape}"
    shape, device = (num_rows, width), hidden_TD.device
    sum_TD = hidden_TD
    if out_TD is not None:
        sum_TD = torch.empty(shape, dtype=hidden_TD.dtype, device=device)
    normed_TD = hidden_TD
    if weight_D is not None:
        assert weight_D.shape == (width,), f"the norm's weight is {weight_D.shape}, not [{width}]"
        assert weight_D.is_contiguous(), "the norm's weight must be contiguous"
        dtype = torch.promote_types(hidden_TD.dtype, weight_D.dtype)
        normed_TD = torch.empty(shape, dtype=dtype, device=device)
    if num_rows:
        config = row_config(width)
        add_and_norm_rows[(num_rows,)](
            hidden_TD,
            out_TD,
            more_TD,
            gate_T,
            weight_D,
            sum_TD,
            normed_TD,
            hidden_TD.stride(0),
            0 if out_TD is None else out_TD.stride(0),
            0 if more_TD is None else more_TD.stride(0),
            multiplier,
            eps,
            WIDTH=width,
            BLOCK=config.block,
            HAS_OUT=out_TD is not None,
            HAS_MORE=more_TD is not None,
            HAS_GATE=gate_T is not None,
            HAS_NORM=weight_D is not None,
            num_warps=config.num_warps,
            enable_fp_fusion=False,  # as torch: products are rounded before they are added
        )
    return sum_TD, normed_TD
