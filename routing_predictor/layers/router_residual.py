"""Predicts a router's choice early: the router's own weights on an earlier hidden state, with a
small learnt correction.

    logits = router(norm(h)) + W2 silu(W1 [norm(h), c])        W2 starts at zero

*next-layer*: h is the residual stream that enters layer l's router (after its attention, before the
norm); norm and router are those of the next layer with routed experts. c is empty. *pre-attention*:
h is the stream that enters layer l's attention; norm (of its router) and router are layer l's own.
c are the same layer's streams of the tokens before this one: attention will most likely add them,
and they are known before it runs.

T tokens, E experts, D model width, C context width, H hidden units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CONTEXT = 3  # tokens before this one, of a pre-attention predictor
_ROWS_AT_ONCE = 2**14
_SHARPNESS = 6.0  # slope of a choice's odds, measured on the demonstration model


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterWeights:
    """One layer's norm and router, in fp32 on the CPU, as in the model."""

    layer: int  # the model's number
    norm_D: Tensor
    norm_eps: float
    weight_ED: Tensor
    bias_E: Tensor | None = None

    def normed(self, hidden_TD: Tensor) -> Tensor:
        """Returns the router's input for a residual stream, in fp32."""
        hidden_TD = hidden_TD.float()
        mean_T1 = hidden_TD.square().mean(-1, keepdim=True)
        return hidden_TD * torch.rsqrt(mean_T1 + self.norm_eps) * self.norm_D

    def logits(self, normed_TD: Tensor) -> Tensor:
        return F.linear(normed_TD, self.weight_ED, self.bias_E)


class RouterResidual(nn.Module):
    """One layer's predictor. The router is the model's; it is neither trained nor stored here."""

    def __init__(self, router: RouterWeights, num_hidden: int, context_width: int = 0) -> None:
        super().__init__()
        self.router = router
        width = router.norm_D.shape[0]
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(1))
        self.first = nn.Linear(width + context_width, num_hidden)
        self.last = nn.Linear(num_hidden, router.weight_ED.shape[0])
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def fit_scale(self, hidden_TD: Tensor) -> None:
        """Sets the scale so that the MLP reads normed rows of mean square 1."""
        self.scale.fill_(1 / self.router.normed(hidden_TD).square().mean().sqrt().clamp_min(1e-6))

    def forward(self, hidden_TD: Tensor, context_TC: Tensor | None = None) -> Tensor:
        """Returns logits [T, E] in fp32; the k largest are the prediction."""
        normed_TD = self.router.normed(hidden_TD)
        features = normed_TD * self.scale
        if context_TC is not None:
            features = torch.cat([features, context_TC.float()], 1)
        residual_TE: Tensor = self.last(F.silu(self.first(features)))
        return self.router.logits(normed_TD) + residual_TE


def choice_probability(logits_NE: Tensor, top_k: int) -> Tensor:
    """Returns the probability that each expert is among the chosen. The set of the k largest does
    not change."""
    return torch.sigmoid(choice_odds(logits_NE, top_k))


def choice_odds(logits_NE: Tensor, top_k: int) -> Tensor:
    """Returns the log odds that each expert is among the chosen: 0 halfway between the k-th and the
    next logit."""
    top = logits_NE.topk(min(top_k + 1, logits_NE.shape[1]), dim=-1).values
    middle_N1 = top[:, top_k - 1 :].mean(-1, keepdim=True)
    return (logits_NE - middle_N1) * _SHARPNESS


def context_of(hidden_ND: Tensor, position_N: Tensor, num: int) -> Tensor:
    """[N, num * D] in fp16: the streams of the tokens 1, ..., num before each, of mean square 1;
    zero before a text's start. Tokens of one text are consecutive.

    position 0 1 2 of the streams a b c, num = 2: rows (0 0), (a 0), (b a).
    """
    num_tokens, width = hidden_ND.shape
    context_NC = torch.zeros(num_tokens, num * width, dtype=torch.float16)
    for part in torch.arange(num_tokens).split(_ROWS_AT_ONCE):
        for back in range(1, num + 1):
            # at a text's start these belong to another text
            rows_TD = hidden_ND[part - back].float()
            mean_T1 = rows_TD.square().mean(-1, keepdim=True)
            rows_TD = rows_TD * torch.rsqrt(mean_T1.clamp_min(1e-12))
            rows_TD.masked_fill_((position_N[part] < back)[:, None], 0.0)
            context_NC[part, (back - 1) * width : back * width] = rows_TD.half()
    return context_NC
