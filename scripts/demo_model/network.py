"""The network that is trained: Qwen3-MoE, written for training on a CPU in bf16.

T tokens, D model width, F expert width, E experts, K top-k, H heads. Parameters are fp32 and carry
our own names; `export.py` gives them their Hugging Face names. Linears run in bf16, norms, softmax
and the router in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the model. The defaults are those of the demonstration model."""

    vocab_size: int = 4096
    width: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 32
    top_k: int = 4
    expert_width: int = 96
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_positions: int = 2048


class _MeanCrossEntropy(torch.autograd.Function):
    """Computes the mean cross entropy from hidden rows, head and targets, and the gradients with
    it.

    Processes the rows in chunks that stay in the cache, so the [T, V] logits never exist.
    """

    @staticmethod
    def forward(ctx, h_TD, head_VD, targets_T):  # type: ignore[no-untyped-def]
        num_tokens = len(targets_T)
        grad_h, grad_head = torch.empty_like(h_TD), torch.zeros(head_VD.shape)
        total = torch.zeros(())
        for start in range(0, num_tokens, 1024):
            h, targets = h_TD[start : start + 1024], targets_T[start : start + 1024, None]
            log_probs = torch.log_softmax((h @ head_VD.t()).float(), dim=-1)
            total -= log_probs.gather(1, targets).sum()
            grad = log_probs.exp_().scatter_add_(1, targets, -torch.ones(targets.shape)).bfloat16()
            torch.mm(grad, head_VD, out=grad_h[start : start + 1024])
            grad_head += (grad.t() @ h).float()
        ctx.save_for_backward(grad_h / num_tokens, (grad_head / num_tokens).bfloat16())
        return total / num_tokens

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad_h, grad_head = ctx.saved_tensors
        return grad * grad_h, grad * grad_head, None


class _Route(torch.autograd.Function):
    """Gathers rows by token into rows by expert (`order` sorts the T * K choices); the backward
    pass adds."""

    @staticmethod
    def forward(ctx, x_TD, order_R, inverse_R, top_k):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inverse_R)
        ctx.top_k = top_k
        return x_TD.index_select(0, order_R // top_k)

    @staticmethod
    def backward(ctx, grad_RD):  # type: ignore[no-untyped-def]
        (inverse_R,) = ctx.saved_tensors
        grad_TKD = grad_RD.index_select(0, inverse_R).view(-1, ctx.top_k, grad_RD.shape[-1])
        return grad_TKD.sum(1), None, None, None


class _Unroute(torch.autograd.Function):
    """Reorders rows by expert into rows by token and choice; forward and backward are
    permutations."""

    @staticmethod
    def forward(ctx, y_RD, order_R, inverse_R):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(order_R)
        return y_RD.index_select(0, inverse_R)

    @staticmethod
    def backward(ctx, grad_RD):  # type: ignore[no-untyped-def]
        (order_R,) = ctx.saved_tensors
        return grad_RD.index_select(0, order_R), None, None


class _GroupedSwiGLU(torch.autograd.Function):
    """Computes the SwiGLU of each row's expert for rows sorted by expert, with one GEMM per expert
    and matrix."""

    @staticmethod
    def forward(ctx, x_RD, gate_EFD, up_EFD, down_EDF, counts):  # type: ignore[no-untyped-def]
        gates, ups, outs = [], [], []
        for e, x in enumerate(x_RD.split(counts)):
            gate, up = x @ gate_EFD[e].t(), x @ up_EFD[e].t()
            gates.append(gate)
            ups.append(up)
            outs.append((functional.silu(gate) * up) @ down_EDF[e].t())
        ctx.save_for_backward(x_RD, gate_EFD, up_EFD, down_EDF, torch.cat(gates), torch.cat(ups))
        ctx.counts = counts
        return torch.cat(outs)

    @staticmethod
    def backward(ctx, grad_RD):  # type: ignore[no-untyped-def]
        x_RD, gate_EFD, up_EFD, down_EDF, gate_RF, up_RF = ctx.saved_tensors
        counts = ctx.counts
        sigmoid_RF = torch.sigmoid(gate_RF)
        silu_RF = gate_RF * sigmoid_RF
        hidden_RF = silu_RF * up_RF
        grad_hidden_RF = torch.cat([g @ down_EDF[e] for e, g in enumerate(grad_RD.split(counts))])
        grad_up_RF = grad_hidden_RF * silu_RF
        slope_RF = sigmoid_RF + silu_RF * (1 - sigmoid_RF)
        grad_gate_RF = grad_hidden_RF * up_RF * slope_RF
        is_frozen, grad_x = not any(ctx.needs_input_grad[1:4]), []
        grads = [torch.empty_like(w[:0] if is_frozen else w) for w in (gate_EFD, up_EFD, down_EDF)]
        grad_gate, grad_up, grad_down = grads
        parts = zip(
            x_RD.split(counts),
            grad_RD.split(counts),
            hidden_RF.split(counts),
            grad_gate_RF.split(counts),
            grad_up_RF.split(counts),
            strict=True,
        )
        for e, (x, g, h, gg, gu) in enumerate(parts):
            if not is_frozen:
                torch.mm(g.t(), h, out=grad_down[e])
                torch.mm(gg.t(), x, out=grad_gate[e])
                torch.mm(gu.t(), x, out=grad_up[e])
            grad_x.append(torch.addmm(gg @ gate_EFD[e], gu, up_EFD[e]))
        return torch.cat(grad_x), *([None] * 3 if is_frozen else grads), None


def _apply(function: type[torch.autograd.Function], *inputs: object) -> Tensor:
    return cast(Tensor, function.apply(*inputs))


class MoE(nn.Module):
    """Softmax router over E experts, top-k renormalised, SwiGLU experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        e, d, f = shape.num_experts, shape.width, shape.expert_width
        self.router = nn.Parameter(torch.randn(e, d) * 0.02)
        self.gate = nn.Parameter(torch.randn(e, f, d) * d**-0.5)
        self.up = nn.Parameter(torch.randn(e, f, d) * d**-0.5)
        self.down = nn.Parameter(torch.zeros(e, d, f))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output [T, D], the balance loss (1 if even) and the expert ids [T, K]."""
        s = self.shape
        probs_TE = torch.softmax(functional.linear(x_TD.float(), self.router), dim=-1)
        weights_TK, ids_TK = probs_TE.topk(s.top_k, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        order = ids_TK.flatten().argsort(stable=True)
        counts_E = ids_TK.flatten().bincount(minlength=s.num_experts)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        x_RD = _apply(_Route, x_TD.bfloat16(), order, inverse, s.top_k)
        weights = (self.gate.bfloat16(), self.up.bfloat16(), self.down.bfloat16())
        y_RD = _apply(_GroupedSwiGLU, x_RD, *weights, counts_E.tolist())
        y_TKD = _apply(_Unroute, y_RD, order, inverse).view(*ids_TK.shape, -1)
        out_TD = torch.einsum("tkd,tk->td", y_TKD, weights_TK.bfloat16())
        share_E = counts_E.float() / counts_E.sum()
        balance = s.num_experts * (share_E * probs_TE.mean(0)).sum()
        return out_TD.float(), balance, ids_TK


class Attention(nn.Module):
    """Grouped-query attention with q/k norm and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        d, q = shape.width, shape.num_heads * shape.head_dim
        kv = shape.num_kv_heads * shape.head_dim
        self.q = nn.Parameter(torch.randn(q, d) * d**-0.5)
        self.k = nn.Parameter(torch.randn(kv, d) * d**-0.5)
        self.v = nn.Parameter(torch.randn(kv, d) * d**-0.5)
        self.o = nn.Parameter(torch.zeros(d, q))
        self.q_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.k_norm = nn.Parameter(torch.ones(shape.head_dim))

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.shape
        b, n, _ = x_BSD.shape
        x = x_BSD.bfloat16()
        weights = (w.bfloat16() for w in (self.q, self.k, self.v))
        q, k, v = (functional.linear(x, w).view(b, n, -1, s.head_dim) for w in weights)
        q = _rotate(
            functional.rms_norm(q.float(), (s.head_dim,), self.q_norm, s.norm_eps), cos, sin
        )
        k = _rotate(
            functional.rms_norm(k.float(), (s.head_dim,), self.k_norm, s.norm_eps), cos, sin
        )
        group = s.num_heads // s.num_kv_heads
        k, v = (t.bfloat16().repeat_interleave(group, 2) for t in (k, v))
        out = functional.scaled_dot_product_attention(
            q.bfloat16().transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return functional.linear(out.transpose(1, 2).reshape(b, n, -1), self.o.bfloat16()).float()


def _rotate(x_BSHd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_BSHd.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Layer(nn.Module):
    """A layer: attention and MoE, each with its norm and residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.eps = shape.norm_eps
        self.attention_norm = nn.Parameter(torch.ones(shape.width))
        self.attention = Attention(shape)
        self.moe_norm = nn.Parameter(torch.ones(shape.width))
        self.moe = MoE(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        width = x.shape[-1]
        x = x + self.attention(
            functional.rms_norm(x, (width,), self.attention_norm, self.eps), cos, sin
        )
        h = functional.rms_norm(x, (width,), self.moe_norm, self.eps).view(-1, width)
        out, balance, ids = self.moe(h)
        return x + out.view(x.shape), balance, ids


class Network(nn.Module):
    """The network: embedding, layers, final norm, and the embedding as the head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocab_size, shape.width) * 0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.final_norm = nn.Parameter(torch.ones(shape.width))
        half = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.outer(torch.arange(shape.max_positions), shape.rope_theta**-half)
        self.register_buffer("cos", angles.cos()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None], persistent=False)

    def hidden(self, ids_BS: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Returns the final hidden rows [B * S, D] in bf16, the balance loss, and the expert ids
        [T, K] by layer."""
        n = ids_BS.shape[1]
        cos, sin = cast(Tensor, self.cos)[:n], cast(Tensor, self.sin)[:n]
        x = functional.embedding(ids_BS, self.embedding)
        balances, expert_ids = [], []
        for layer in self.layers:
            x, balance, ids = layer(x, cos, sin)
            balances.append(balance)
            expert_ids.append(ids)
        x = functional.rms_norm(x, (self.shape.width,), self.final_norm, self.shape.norm_eps)
        rows = x.view(-1, self.shape.width).bfloat16()
        return rows, torch.stack(balances).mean(), expert_ids

    def loss(self, ids_BS: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Returns the mean cross entropy in nats per token, the balance loss, and the expert ids
        [T, K] by layer."""
        rows, balance, expert_ids = self.hidden(ids_BS)
        entropy = _apply(_MeanCrossEntropy, rows, self.embedding.bfloat16(), targets_BS.flatten())
        return entropy, balance, expert_ids
