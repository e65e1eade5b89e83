"""Texts cut at random places: what a request predictor learns from and is judged by.

S samples, L layers, K choices, E experts. A cut leaves at least one token before it and `horizon`
after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routing_predictor.errors import TraceError
from routing_predictor.texts import RoutedTexts

HORIZON = 32
MAX_PREFIX = 512  # tokens of a prefix that pools and histories look at


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCuts:
    """Sample s: the tokens [start, end) of a text are known, [end, end + horizon) are asked for."""

    texts: RoutedTexts
    start_S: NDArray[np.int64]
    end_S: NDArray[np.int64]
    request_S: NDArray[np.int64]
    horizon: int

    @property
    def num_samples(self) -> int:
        return len(self.end_S)

    @property
    def document_S(self) -> NDArray[np.int64]:
        return self.texts.document[self.request_S]

    def prefixes(self) -> list[NDArray[np.int32]]:
        """The known tokens of each sample, the last MAX_PREFIX of them."""
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

    def history(self) -> NDArray[np.int64]:
        """[S, L, E]: how many of the prefix's last MAX_PREFIX tokens chose each expert."""
        return np.stack(
            [
                self.counts(max(start, end - MAX_PREFIX), end)
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
    texts: RoutedTexts, num_samples: int, *, seed: int, horizon: int = HORIZON, min_prefix: int = 8
) -> PrefixCuts:
    """Cuts of random places, each place of each text as likely as any other.

    Raises TraceError where no text is long enough.
    """
    places = np.maximum(0, texts.lengths - horizon - min_prefix + 1)
    if not places.sum():
        raise TraceError(
            f"no text has {min_prefix + horizon} tokens: the longest of {texts.num_requests} has "
            f"{int(texts.lengths.max(initial=0))}"
        )
    rng = np.random.default_rng(seed)
    request = np.sort(rng.choice(len(places), num_samples, p=places / places.sum()))
    start = texts.starts[request]
    return PrefixCuts(
        texts=texts,
        start_S=start,
        end_S=start + min_prefix + (rng.random(num_samples) * places[request]).astype(np.int64),
        request_S=request,
        horizon=horizon,
    )


def cut_each(
    texts: RoutedTexts, per_text: int, *, seed: int, horizon: int = HORIZON, min_prefix: int = 8
) -> PrefixCuts:
    """The same number of cuts of every text that is long enough: for judging."""
    places = np.maximum(0, texts.lengths - horizon - min_prefix + 1)
    long_enough = np.flatnonzero(places)
    if not len(long_enough):
        raise TraceError(
            f"no text has {min_prefix + horizon} tokens: the longest of {texts.num_requests} has "
            f"{int(texts.lengths.max(initial=0))}"
        )
    request = np.repeat(long_enough, per_text)
    draws = np.random.default_rng(seed).random(len(request))
    start = texts.starts[request]
    return PrefixCuts(
        texts=texts,
        start_S=start,
        end_S=start + min_prefix + (draws * places[request]).astype(np.int64),
        request_S=request,
        horizon=horizon,
    )
