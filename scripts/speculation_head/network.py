"""The head as it is trained: parameters in fp32, products in bf16.

B rows, D model width, F hidden width of a block, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Sizes of a head. The defaults suit the demonstration model."""

    width: int
    hidden: int = 640
    num_blocks: int = 2
    norm_eps: float = 1e-6


class _CrossEntropy(torch.autograd.Function):
    """Computes the cross entropy of each row with a distribution over a few tokens, and the rows'
    gradients with it.

    Processes the rows in chunks that stay in the cache, so the [B, V] logits never exist.
    """

    @staticmethod
    def forward(ctx, h_BD, head_VD, ids_BK, probs_BK):  # type: ignore[no-untyped-def]
        grad_BD, losses = torch.empty_like(h_BD), []
        for start in range(0, len(h_BD), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            log_probs = torch.log_softmax((h_BD[part] @ head_VD.t()).float(), dim=-1)
            losses.append(-(log_probs.gather(1, ids_BK[part]) * probs_BK[part]).sum(1))
            grad = log_probs.exp_().scatter_add_(1, ids_BK[part], -probs_BK[part]).bfloat16()
            torch.mm(grad, head_VD, out=grad_BD[part])
        ctx.save_for_backward(grad_BD)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx, grad_B):  # type: ignore[no-untyped-def]
        (grad_BD,) = ctx.saved_tensors
        return grad_BD * grad_B[:, None].to(grad_BD.dtype), None, None, None


def cross_entropy(h_BD: Tensor, head_VD: Tensor, ids_BK: Tensor, probs_BK: Tensor) -> Tensor:
    """Returns the cross entropy [B] in nats of softmax(h head^T) with the given distributions."""
    function: type[torch.autograd.Function] = _CrossEntropy
    return cast(Tensor, function.apply(h_BD, head_VD, ids_BK, probs_BK))


class Block(nn.Module):
    """Norm, SwiGLU and residual."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        d, f = shape.width, shape.hidden
        self.eps = shape.norm_eps
        self.norm = nn.Parameter(torch.ones(d))
        self.gate = nn.Parameter(torch.randn(f, d) * d**-0.5)
        self.up = nn.Parameter(torch.randn(f, d) * d**-0.5)
        self.down = nn.Parameter(torch.zeros(d, f))

    def forward(self, x_BD: Tensor) -> Tensor:
        y = functional.rms_norm(x_BD, self.norm.shape, self.norm, self.eps).bfloat16()
        gate, up = (
            functional.linear(y, self.gate.bfloat16()),
            functional.linear(y, self.up.bfloat16()),
        )
        out = functional.linear(functional.silu(gate) * up, self.down.bfloat16())
        return x_BD + out.float()


class DraftingHead(nn.Module):
    """One step: the state behind a token and the token that follows it -> the next state.

    The first state is the model's last residual stream. The model's own output head turns a
    state, normed, into logits.
    """

    def __init__(self, shape: HeadShape, embedding_VD: Tensor, final_norm_D: Tensor) -> None:
        super().__init__()
        self.shape = shape
        d = shape.width
        self.state_norm = nn.Parameter(torch.ones(d))
        self.token_norm = nn.Parameter(torch.ones(d))
        self.state_in = nn.Parameter(torch.eye(d))
        self.token_in = nn.Parameter(torch.randn(d, d) * 0.1 * d**-0.5)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_blocks))
        self.output_norm = nn.Parameter(final_norm_D.clone().float())
        normed = functional.rms_norm(embedding_VD.float(), (d,), None, shape.norm_eps)
        self.register_buffer("embedding", normed, persistent=False)

    def forward(self, state_BD: Tensor, tokens_B: Tensor) -> Tensor:
        eps, size = self.shape.norm_eps, self.state_norm.shape
        state_BD = functional.rms_norm(state_BD.float(), size, self.state_norm, eps)
        token_BD = functional.embedding(tokens_B, cast(Tensor, self.embedding)) * self.token_norm
        x_BD = functional.linear(state_BD.bfloat16(), self.state_in.bfloat16()).float()
        x_BD = x_BD + functional.linear(token_BD.bfloat16(), self.token_in.bfloat16()).float()
        for block in self.blocks:
            x_BD = block(x_BD)
        return x_BD

    def normed(self, state_BD: Tensor) -> Tensor:
        """Returns the rows for the output head, in bf16."""
        norm = self.output_norm
        return functional.rms_norm(state_BD, norm.shape, norm, self.shape.norm_eps).bfloat16()
