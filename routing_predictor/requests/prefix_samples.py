"""Cuts texts at random places, as samples to train and judge a request predictor.

S samples, L layers, K choices, E experts. A cut leaves MIN_PREFIX tokens before it and `horizon`
after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routing_predictor.requests.texts import RoutedTexts
from routing_predictor.traces.routing_error import TraceError

HORIZON = 32
MIN_PREFIX = 8  # tokens that a cut leaves before it
MAX_PREFIX = 512  # tokens of a prefix that pools and histories use


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
        """Return the known tokens of each sample, the last MAX_PREFIX of them."""
        tokens = self.texts.token_T
        if tokens is None:
            raise TraceError(
                "the trace holds no token ids: record it with them, or predict from history"
            )
        return [
            tokens[max(start, end - MAX_PREFIX) : end]
            for start, end in zip(self.start_S, self.end_S, strict=True)
        ]

    def coming(self) -> NDArray[np.int64]:
        """[S, L, E]: how many of the coming tokens choose each expert."""
        return np.stack([self.counts(end, end + self.horizon) for end in self.end_S])

    def history(self, window: int = MAX_PREFIX) -> NDArray[np.int64]:
        """[S, L, E]: how many of the prefix's last tokens chose each expert."""
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
    """Return the number of cuts that each text allows."""
    places: NDArray[np.int64] = np.maximum(0, texts.lengths - horizon - MIN_PREFIX + 1)
    if not places.sum():
        raise TraceError(
            f"no text has {MIN_PREFIX + horizon} tokens: the longest of {texts.num_requests} has "
            f"{int(texts.lengths.max(initial=0))}"
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
