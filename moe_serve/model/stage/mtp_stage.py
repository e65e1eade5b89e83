"""Predicts the token behind the next one with one more layer, which the checkpoint ships (MTP).

    x_p = projection [ norm(embedding(token p+1)), norm(state p) ]
    state' = norm(layer(x_0 ... x_p))            its head predicts token p+2

`state p` is the model's, behind its final norm. To predict further tokens the layer continues from
its own states (DeepSeek-V3 report, section 2.2; the order of the two parts is that of the published
weights). It has keys and values of its own for every position of a sequence.

T rows, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from experts.expert_stage import ExpertStage
from moe_kernels.interface.kernels import Linear
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.step_plan import MicroBatch


@dataclass(frozen=True, slots=True)
class Fusion:
    """The weights before the layer: norms of its two inputs, and the projection [2 D] -> [D]."""

    token_norm_D: Tensor
    state_norm_D: Tensor
    projection: Linear


MAX_TOKENS = 4  # that are drafted for a sequence; each is less probable than the one before
MAX_GUESSES = 32  # of a step, over all its sequences


def num_own_pages(page_size: int) -> int:
    """Returns the number of pages for drafted tokens behind the ends of sequences."""
    return MAX_GUESSES * pages_of_draft(page_size)


def pages_of_draft(page_size: int) -> int:
    """Returns the number of pages that the drafted tokens of one sequence may need. The last of
    them has no keys and values."""
    return -(-(MAX_TOKENS - 1) // page_size)


class MTPStage:
    """Runs the layer with all its experts in this process."""

    def __init__(
        self, model: AttentionStage, fusion: Fusion, decoder: AttentionStage, experts: ExpertStage
    ) -> None:
        """`decoder` has the layer as its only one, the norm of its output, an embedding and a
        head."""
        self._model, self._fusion, self._decoder, self._experts = model, fusion, decoder, experts

    @torch.inference_mode()
    def first_states(self, batch: MicroBatch, hidden_TD: Tensor, cache: KVCache) -> Tensor:
        """Runs the layer behind the model -> its states [T, D].

        A slice has positions that the model has computed, and for each the token that *follows*.
        `hidden_TD` is the model's residual stream there, behind its last layer.
        """
        return self._run(batch, self._model.normed(hidden_TD), cache)

    @torch.inference_mode()
    def next_states(self, batch: MicroBatch, state_TD: Tensor, cache: KVCache) -> Tensor:
        """Runs the layer behind itself, one position further than its last states -> [T, D]."""
        return self._run(batch, state_TD, cache)

    @torch.inference_mode()
    def logits(self, state_TD: Tensor) -> Tensor:
        """Applies the head -> [T, V] in fp32."""
        return self._decoder.head_logits(state_TD)

    def _run(self, batch: MicroBatch, state_TD: Tensor, cache: KVCache) -> Tensor:
        decoder, fusion = self._decoder, self._fusion
        inputs = decoder.make_inputs(batch, cache, state_TD.device)
        kernels, eps = decoder.kernels, decoder.spec.norm_eps
        token_TD = kernels.rms_norm(decoder.embed(inputs), fusion.token_norm_D, eps)
        state_TD = kernels.rms_norm(state_TD, fusion.state_norm_D, eps)
        hidden_TD = fusion.projection(torch.cat((token_TD, state_TD), dim=1))
        advance = decoder.advance(0, hidden_TD, inputs, cache)
        hidden_TD, routed = advance.hidden_TD, advance.routed
        if routed is not None:
            rows, experts = routed.rows, self._experts.layer(0)
            out_TD = experts.total(rows.x_TD, rows.expert_ids_TK, rows.weights_TK)
            hidden_TD = decoder.add(hidden_TD, out_TD, decoder.shared(0, routed.x_TD))
        return decoder.normed(hidden_TD)


@dataclass(frozen=True, slots=True)
class MTPPart:
    """The layer, the cache that it writes to, and the pages there that no sequence has. They take
    the keys and values of drafted tokens behind the end of a sequence's own pages."""

    stage: MTPStage
    cache: KVCache
    own_pages: range
    max_positions: int
