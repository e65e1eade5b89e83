"""A drafting head, kernel by kernel: the definition, and the fallback."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.interface.head_drafting import DraftingParts, Guesses
from moe_kernels.interface.kernels import Kernels


class StepwiseDrafting:
    """Implements HeadDrafting with the other kernels of a set."""

    def __init__(self, kernels: Kernels, parts: DraftingParts) -> None:
        self._kernels, self._parts = kernels, parts

    def __call__(
        self, state_SD: Tensor, token_ids_S: Tensor, most: int, least: float = 0.0
    ) -> Guesses:
        parts, tokens, confidences = self._parts, list[Tensor](), list[Tensor]()
        left_S = torch.ones(len(state_SD), device=state_SD.device)
        is_on_S = torch.ones(len(state_SD), dtype=torch.bool, device=state_SD.device)
        for _ in range(most):
            state_SD = self._step(state_SD, token_ids_S)
            normed_SD = self._kernels.rms_norm(state_SD, parts.output_norm_D, parts.norm_eps)
            logits_SV = parts.output(normed_SD).float()
            top_S, token_ids_S = logits_SV.max(dim=1)
            confidence_S = 1.0 / (logits_SV - top_S[:, None]).exp().sum(dim=1)
            left_S = left_S * confidence_S
            if least > 0.0:
                is_on_S = is_on_S & (left_S >= least)
            tokens.append(torch.where(is_on_S, token_ids_S, -1))
            confidences.append(torch.where(is_on_S, confidence_S, 0.0))
            if not is_on_S.any():
                break
        absent = most - len(tokens)
        return Guesses(
            F.pad(torch.stack(tokens, dim=1), (0, absent), value=-1),
            F.pad(torch.stack(confidences, dim=1), (0, absent)),
        )

    def _step(self, state_SD: Tensor, token_ids_S: Tensor) -> Tensor:
        parts, norm, eps = self._parts, self._kernels.rms_norm, self._parts.norm_eps
        token_SD = norm(parts.embedding_VD[token_ids_S], parts.token_norm_D, eps)
        state_SD = norm(state_SD, parts.state_norm_D, eps)
        state_SD = parts.state_in(state_SD, parts.token_in(token_SD))
        ids_S1 = torch.zeros(len(state_SD), 1, dtype=torch.int64, device=state_SD.device)
        weights_S1 = torch.ones(len(state_SD), 1, dtype=torch.float32, device=state_SD.device)
        for block in parts.blocks:
            out_SD = block.mlp(norm(state_SD, block.norm_D, eps), ids_S1, weights_S1)
            state_SD = self._kernels.add(state_SD, out_SD, None)
        return state_SD
