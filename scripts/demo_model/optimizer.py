"""Optimises matrices and stacked experts with Muon, and the rest with Adam; states are saved as
tensors.

Muon: K. Jordan et al., 2024: momentum, then the update's nearest semi-orthogonal matrix by five
Newton-Schulz steps. `torch.optim.Muon` takes single matrices only; expert weights are stacks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ADAM_NAMES = ("embedding", "router", "norm")


def orthogonalize(update: Tensor) -> Tensor:
    """Returns the quintic Newton-Schulz approximation of U V^T for [..., M, N], in bf16."""
    x: Tensor = update.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT.contiguous()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


class Optimizer:
    """`step(scale)` applies one update with both learning rates times `scale`."""

    def __init__(self, network: nn.Module, *, muon_lr: float, adam_lr: float) -> None:
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        self.params = dict(network.named_parameters())
        self.state: dict[str, Tensor] = {"steps": torch.zeros((), dtype=torch.int64)}
        for name, p in self.params.items():
            self.state[f"first.{name}"] = torch.zeros_like(p)
            if self._is_adam(name):
                self.state[f"second.{name}"] = torch.zeros_like(p)

    @staticmethod
    def _is_adam(name: str) -> bool:
        return any(part in name for part in _ADAM_NAMES)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        self.state["steps"] += 1
        count = int(self.state["steps"])
        for name, p in self.params.items():
            assert p.grad is not None, f"no gradient reached {name}"
            first = self.state[f"first.{name}"]
            if self._is_adam(name):
                second = self.state[f"second.{name}"]
                first.lerp_(p.grad, 0.1)
                second.mul_(0.95).addcmul_(p.grad, p.grad, value=0.05)
                denominator = (second / (1 - 0.95**count)).sqrt_().add_(1e-10)
                p.addcdiv_(first, denominator, value=-self.adam_lr * scale / (1 - 0.9**count))
            else:
                first.lerp_(p.grad, 0.05)
                update = orthogonalize(p.grad.lerp(first, 0.95)).to(p.dtype)
                shape_scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - 0.01 * self.muon_lr * scale)
                p.add_(update, alpha=-self.muon_lr * scale * shape_scale)
            p.grad = None
