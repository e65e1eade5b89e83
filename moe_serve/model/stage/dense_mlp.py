"""An MLP that every row passes: a shared expert, or the MLP of a layer without routed experts.

It is a bank of one expert, so it uses the routed experts' kernels and formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.interface.kernels import ExpertBank, RouterLinear
from moe_serve.model.stage.gather import GatheredMLP


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMLP:
    """Computes x [T, D] -> [T, D] in fp32, multiplied by sigmoid(gate(x)) if there is a gate."""

    bank: ExpertBank | GatheredMLP
    gate: RouterLinear | None = None

    def __call__(self, x_TD: Tensor) -> Tensor:
        ids_T1 = torch.zeros(len(x_TD), 1, dtype=torch.int64, device=x_TD.device)
        if self.gate is None:
            weights_T1 = torch.ones(len(x_TD), 1, dtype=torch.float32, device=x_TD.device)
        else:
            weights_T1 = 1.0 / (1.0 + torch.exp(-self.gate(x_TD)))
        return self.bank(x_TD, ids_T1, weights_T1)
