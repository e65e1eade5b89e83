"""Trains the request predictor: random prefixes, and the share of the coming choices.

S samples, F features, L layers with routed experts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from routing_predictor.requests.pools import WINDOWS, PrefixPools
from routing_predictor.requests.prefix_samples import HORIZON, PrefixCuts, cut_each, cut_texts
from routing_predictor.requests.request_mlp import NUM_HIDDEN, RequestMLP
from routing_predictor.requests.texts import RoutedTexts, split_documents
from routing_predictor.traces.fitting import Progress, Recipe, Task, TrainingCourse, fit

_TOKENS_PER_CUT = 8
_CUTS_AT_ONCE = 1024
_HELD_OUT_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixData:
    """Pooled prefixes and the choices that followed them."""

    features_SF: Tensor  # fp16
    share_SLE: Tensor  # fp16: share of the coming choices


Features = Callable[[PrefixCuts], Tensor]  # returns [S, F] in fp16


def train_request(
    texts: RoutedTexts,
    features_of: Features,
    recipe: Recipe,
    progress: Progress,
    num_hidden: int = NUM_HIDDEN,
    horizon: int = HORIZON,
) -> tuple[RequestMLP, TrainingCourse]:
    """Train a predictor. Raises TraceError if there are too few texts or they are too short."""
    torch.manual_seed(recipe.seed)
    learnt, held_out = split_documents(texts, _HELD_OUT_SHARE, recipe.seed)
    num_cuts = max(recipe.batch_size, len(learnt.expert_ids_TLK) // _TOKENS_PER_CUT)
    progress("cutting texts", 0.0)
    data = make_data(cut_texts(learnt, num_cuts, seed=recipe.seed, horizon=horizon), features_of)
    unseen = make_data(cut_each(held_out, 8, seed=recipe.seed, horizon=horizon), features_of)
    num_layers = texts.expert_ids_TLK.shape[1]
    mlp = RequestMLP(data.features_SF.shape[1], num_layers, texts.num_experts, num_hidden)
    mlp.fit_scale(data.features_SF[: 2**15].float())
    task = Task(
        num_samples=num_cuts,
        loss=lambda samples: share_loss(mlp, data.features_SF[samples], data.share_SLE[samples]),
        held_out=lambda: _held_out_loss(mlp, unseen),
        name="request",
    )
    return mlp, fit(mlp, task, recipe, progress)


def share_loss(mlp: RequestMLP, features_SF: Tensor, share_SLE: Tensor) -> Tensor:
    """Cross entropy between the shares, mean over layers."""
    log_share_SLE = mlp(features_SF.float()).log_softmax(-1)
    loss: Tensor = -(log_share_SLE * share_SLE.float()).sum(-1).mean()
    return loss


@torch.inference_mode()
def _held_out_loss(mlp: RequestMLP, data: PrefixData) -> float:
    return float(share_loss(mlp, data.features_SF, data.share_SLE))


def make_data(cuts: PrefixCuts, features_of: Features) -> PrefixData:
    num_choices = cuts.horizon * cuts.texts.expert_ids_TLK.shape[2]
    shares = torch.from_numpy((cuts.coming() / num_choices).astype("float16"))
    return PrefixData(features_SF=features_of(cuts), share_SLE=shares)


def pooled(cuts: PrefixCuts, pools: PrefixPools) -> Tensor:
    """[S, F]: the input of the request predictor."""
    prefixes = cuts.prefixes()
    return torch.cat(
        [
            pools.pool(prefixes[first : first + _CUTS_AT_ONCE]).half()
            for first in range(0, len(prefixes), _CUTS_AT_ONCE)
        ]
    )


def history_shares(cuts: PrefixCuts, windows: Sequence[int] = WINDOWS) -> Tensor:
    """[S, W * L * E]: the share of the choices of the last tokens, for each window; used for traces
    without token ids."""
    parts = [
        torch.from_numpy(shares_of(cuts.history(window))).flatten(1).half() for window in windows
    ]
    return torch.cat(parts, 1)


def shares_of(count_SLE: NDArray[np.integer]) -> NDArray[np.float32]:
    whole = np.maximum(count_SLE.sum(-1, keepdims=True), 1)
    shares: NDArray[np.float32] = (count_SLE / whole).astype(np.float32)
    return shares
