"""Trains the request predictor: texts cut at random places, and the share of the coming choices.

S samples, F features, L layers with routed experts, K choices, E experts. A cut leaves MIN_PREFIX
tokens before it and `horizon` after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from routing_predictor.requests.request_mlp import NUM_HIDDEN, WINDOWS, PrefixPools, RequestMLP
from routing_predictor.requests.texts import RoutedTexts, split_documents
from routing_predictor.traces.fitting import Progress, Recipe, Task, TrainingCourse, fit
from routing_predictor.traces.routing_error import TraceError

HORIZON = 32
MIN_PREFIX = 8  # tokens that a cut leaves before it
MAX_PREFIX = 512  # tokens of a prefix that pools and histories use
_TOKENS_PER_CUT = 8
_CUTS_AT_ONCE = 1024
_HELD_OUT_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCuts:
    """Samples; in sample s the tokens [start, end) of a text are known and [end, end + horizon) are
    predicted."""

    texts: RoutedTexts
    start_S: NDArray[np.int64]
    end_S: NDArray[np.int64]
    request_S: NDArray[np.int64]
    horizon: int

    @property
    def num_samples(self) -> int:
        return len(self.end_S)

    @property
    def documents(self) -> NDArray[np.int64]:
        return self.texts.document[self.request_S]

    def prefixes(self) -> list[NDArray[np.int32]]:
        """Returns the known tokens of each sample, the last MAX_PREFIX of them."""
        tokens = self.texts.token_T
        if tokens is None:
            raise TraceError(
                "the trace has no token ids: record it with them, or use the predictions "
                "from history, which need no training"
            )
        return [
            tokens[max(start, end - MAX_PREFIX) : end]
            for start, end in zip(self.start_S, self.end_S, strict=True)
        ]

    def coming(self) -> NDArray[np.int64]:
        """Returns [S, L, E]: how many of the coming tokens choose each expert."""
        return np.stack([self.counts(end, end + self.horizon) for end in self.end_S])

    def history(self, window: int = MAX_PREFIX) -> NDArray[np.int64]:
        """Returns [S, L, E]: how many of the prefix's last tokens chose each expert."""
        return np.stack(
            [
                self.counts(max(start, end - window), end)
                for start, end in zip(self.start_S, self.end_S, strict=True)
            ]
        )

    def counts(self, begin: int, end: int) -> NDArray[np.int64]:
        """[L, E] of the tokens [begin, end)."""
        ids_TLK, num_experts = self.texts.expert_ids_TLK[begin:end], self.texts.num_experts
        num_layers = ids_TLK.shape[1]
        shifted = ids_TLK.astype(np.int64) + num_experts * np.arange(num_layers)[None, :, None]
        counts = np.bincount(shifted.ravel(), minlength=num_layers * num_experts)
        return counts.reshape(num_layers, num_experts)


def cut_texts(
    texts: RoutedTexts, num_samples: int, *, seed: int, horizon: int = HORIZON
) -> PrefixCuts:
    """Cut texts at random places, every possible place with equal probability. Raises TraceError if
    no text is long enough."""
    places = _places(texts, horizon)
    rng = np.random.default_rng(seed)
    request = np.sort(rng.choice(len(places), num_samples, p=places / places.sum()))
    return _cut(texts, request, places, rng, horizon)


def cut_each(texts: RoutedTexts, per_text: int, *, seed: int, horizon: int = HORIZON) -> PrefixCuts:
    """Cut every text that is long enough the same number of times, for judging."""
    places = _places(texts, horizon)
    request = np.repeat(np.flatnonzero(places), per_text)
    return _cut(texts, request, places, np.random.default_rng(seed), horizon)


def _places(texts: RoutedTexts, horizon: int) -> NDArray[np.int64]:
    """Returns the number of cuts that each text allows."""
    places: NDArray[np.int64] = np.maximum(0, texts.lengths - horizon - MIN_PREFIX + 1)
    if not places.sum():
        raise TraceError(
            f"no text has {MIN_PREFIX + horizon} tokens; the longest of "
            f"{texts.num_requests} has {int(texts.lengths.max(initial=0))}"
        )
    return places


def _cut(
    texts: RoutedTexts,
    request: NDArray[np.int64],
    places: NDArray[np.int64],
    rng: np.random.Generator,
    horizon: int,
) -> PrefixCuts:
    start = texts.starts[request]
    offset = (rng.random(len(request)) * places[request]).astype(np.int64)
    return PrefixCuts(
        texts=texts,
        start_S=start,
        end_S=start + MIN_PREFIX + offset,
        request_S=request,
        horizon=horizon,
    )


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
    """Trains a predictor. Raises TraceError if there are too few texts or they are too short."""
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
    """Returns [S, F]: the input of the request predictor."""
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
