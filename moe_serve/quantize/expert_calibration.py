"""Rounds the experts of a layer for the inputs that texts give them.

T tokens, n rows of one expert, D model width, F expert width.

Gate and up of expert e are rounded for

    H_e = (sum over its rows of x x^T + P H) / (n + P)

where H is the mean of x x^T over all tokens of the layer, whichever experts they chose: P tokens of
it stand for what the texts did not show. The down projection is rounded likewise for the expert's
hidden rows. If there are few of them, a sample of all tokens passes the expert, for these
statistics only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.expert_stage import RoutedRows
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation
from moe_kernels.interface.quantised_matrix import as_floats
from moe_kernels.reference.expert_mlp import activate
from moe_serve.quantize.column_rounding import gptq_rounded
from moe_serve.quantize.quantise_plan import PlannedExpert
from moe_serve.quantize.rounded_matrix import RoundedMatrix, Storage
from moe_serve.quantize.rtn import rounded

POOL = 0.5
_FEWEST_ROWS = 64  # an expert with fewer is rounded to nearest if nothing is pooled
_PLENTY = 4  # rows for each input of a matrix
_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class ExpertReport:
    """The calibration of one expert: the rows that it had, and the rule that rounded it."""

    num_rows: int
    rule: str  # "own", "pooled" or "rtn"


@dataclass(frozen=True, slots=True)
class GptqSettings:
    """`pool`: the tokens of all that are added to an expert's own, as a share of its inputs; 0 adds
    none.
    """

    scale_dtype: torch.dtype
    pool: float = POOL
    seed: int = 0


class ExpertCalibration:
    """Rounds the routed experts of one layer."""

    def __init__(
        self, rows: RoutedRows, activation: GatedActivation, settings: GptqSettings
    ) -> None:
        self._rows, self._activation, self._settings = rows, activation, settings
        self._mean_DD = second_moments(rows.x_TD) if settings.pool else None
        generator = torch.Generator().manual_seed(settings.seed)
        self._shuffled_T = torch.randperm(len(rows.x_TD), generator=generator)

    @torch.inference_mode()
    def round(
        self, expert: int, weights: ExpertWeights, planned: PlannedExpert
    ) -> tuple[dict[str, RoundedMatrix], ExpertReport]:
        """Rounds one expert's matrices; their names are those of the plan."""
        row_n, _ = (self._rows.expert_ids_TK == expert).nonzero(as_tuple=True)
        num_rows, storage = len(row_n), planned.gate.storage
        gate, up, down = (
            as_floats(m, torch.float32).float() for m in (weights.gate, weights.up, weights.down)
        )
        names = [matrix.name for matrix in planned.matrices]
        if num_rows < _FEWEST_ROWS and self._mean_DD is None:
            dtype = self._settings.scale_dtype
            results = [rounded(weight, storage, dtype) for weight in (gate, up, down)]
            return dict(zip(names, results, strict=True)), ExpertReport(num_rows, "rtn")
        x_nD = self._rows.x_TD[row_n]
        hessian_DD = second_moments(x_nD) if num_rows else torch.zeros(0)
        hessian_DD = self._pooled(hessian_DD, self._mean_DD, num_rows)
        both = gptq_rounded(torch.cat([gate, up]), hessian_DD, storage, self._settings.scale_dtype)
        gate_q, up_q = both.rows(slice(len(gate))), both.rows(slice(len(gate), None))
        moments_FF = self._hidden_moments(x_nD, gate_q, up_q, weights)
        down_q = gptq_rounded(down, moments_FF, storage, self._settings.scale_dtype)
        is_plenty = num_rows >= _PLENTY * gate.shape[1]
        results = [gate_q, up_q, down_q]
        rule = "own" if is_plenty or self._mean_DD is None else "pooled"
        return dict(zip(names, results, strict=True)), ExpertReport(num_rows, rule)

    def _pooled(self, own: Tensor, pooled: Tensor | None, num_rows: int) -> Tensor:
        if pooled is None:
            return own
        share = self._settings.pool * len(pooled)
        if not num_rows:
            return pooled
        return (own * num_rows + pooled * share) / (num_rows + share)

    def _hidden_moments(
        self,
        x_nD: Tensor,
        gate: RoundedMatrix,
        up: RoundedMatrix,
        weights: ExpertWeights,
    ) -> Tensor:
        """Returns the second moments of the rows that enter the down projection."""
        width, num_rows = gate.shape[0], len(x_nD)

        def hidden(x_TD: Tensor) -> Tensor:
            return _hidden(x_TD, gate, up, weights, self._activation)

        own = torch.zeros(0)
        if num_rows:
            own = second_moments(hidden(x_nD))
        if self._mean_DD is None or num_rows >= _PLENTY * width:
            return own
        sample_T = self._shuffled_T[: _PLENTY * width]
        return self._pooled(own, second_moments(hidden(self._rows.x_TD[sample_T])), num_rows)


def second_moments(x_TK: Tensor) -> Tensor:
    """Returns the mean of x x^T over rows, [K, K] in fp32."""
    total_KK = torch.zeros(x_TK.shape[1], x_TK.shape[1])
    for rows in _slices(len(x_TK)):
        part = x_TK[rows].float()
        total_KK.addmm_(part.t(), part)
    return total_KK / max(1, len(x_TK))


def round_mlp(
    weights: dict[str, Tensor],
    x_TD: Tensor,
    activation: GatedActivation,
    storage: Storage,
    scale_dtype: torch.dtype,
) -> dict[str, RoundedMatrix]:
    """Rounds a shared expert or a dense MLP, which all tokens pass; keys as in its table."""
    hessian_DD = second_moments(x_TD)
    results = {
        key: gptq_rounded(weight, hessian_DD, storage, scale_dtype)
        for key, weight in weights.items()
        if key != "down"
    }
    if "down" not in weights:
        return results
    fused = results.get("gate_up")
    if fused is not None:
        half = fused.shape[0] // 2
        gate, up = fused.rows(slice(half)), fused.rows(slice(half, None))
    elif "gate" in results and "up" in results:
        gate, up = results["gate"], results["up"]
    else:  # kept as they are: their outputs are not known here
        return results | {"down": rounded(weights["down"], storage, scale_dtype)}
    hidden_TF = _hidden(x_TD, gate, up, None, activation)
    moments_FF = second_moments(hidden_TF)
    return results | {"down": gptq_rounded(weights["down"], moments_FF, storage, scale_dtype)}


def _hidden(
    x_TD: Tensor,
    gate: RoundedMatrix,
    up: RoundedMatrix,
    weights: ExpertWeights | None,
    activation: GatedActivation,
) -> Tensor:
    """Returns the rows [T, F] that enter the down projection, in the dtype of x."""
    gate_FD, up_FD = gate.floats(torch.float32), up.floats(torch.float32)
    gate_bias = up_bias = torch.zeros(())
    if weights is not None and weights.gate_bias is not None and weights.up_bias is not None:
        gate_bias, up_bias = weights.gate_bias.float(), weights.up_bias.float()
    hidden_TF = torch.empty(len(x_TD), len(gate_FD), dtype=x_TD.dtype)
    for rows in _slices(len(x_TD)):
        part = x_TD[rows].float()
        g_nF, u_nF = part @ gate_FD.t() + gate_bias, part @ up_FD.t() + up_bias
        hidden_TF[rows] = activate(g_nF, u_nF, activation).to(x_TD.dtype)
    return hidden_TF


def _slices(num_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        yield slice(start, start + _ROWS_AT_ONCE)
