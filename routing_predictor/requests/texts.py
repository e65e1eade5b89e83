"""A trace as whole requests: the tokens of each are consecutive, in the order of their positions.

T tokens, L layers with routed experts, K choices. A long document may be several requests, its
pieces; their ids are equal up to PIECE, and they count as one document.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routing_predictor.traces.routing_error import TraceError
from routing_predictor.traces.trace import RoutingTrace

PIECE = "#piece"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedTexts:
    """The texts; request r is the tokens [starts[r], starts[r + 1])."""

    expert_ids_TLK: NDArray[np.integer]
    token_T: NDArray[np.int32] | None
    starts: NDArray[np.int64]  # one more entry than there are requests
    document: NDArray[np.int64]  # of each request; documents are split and resampled as a whole
    label: tuple[str, ...]  # of each request; "" without a label
    num_experts: int

    @property
    def num_requests(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = np.diff(self.starts)
        return lengths

    def choose(self, requests: NDArray[np.int64]) -> RoutedTexts:
        """Returns some of the requests, in this order."""
        spans = [np.arange(self.starts[r], self.starts[r + 1]) for r in requests]
        tokens = np.concatenate([*spans, np.empty(0, dtype=np.int64)])
        return RoutedTexts(
            expert_ids_TLK=self.expert_ids_TLK[tokens],
            token_T=None if self.token_T is None else self.token_T[tokens],
            starts=np.concatenate([[0], np.cumsum([len(span) for span in spans])]).astype(np.int64),
            document=self.document[requests],
            label=tuple(self.label[r] for r in requests),
            num_experts=self.num_experts,
        )


def texts_of(trace: RoutingTrace) -> RoutedTexts:
    """Groups a trace by request. Raises TraceError if there is no request."""
    if not trace.num_tokens:
        raise TraceError("the trace holds no tokens")
    order = np.argsort(trace.request_N, kind="stable")
    requests, starts = np.unique(trace.request_N[order], return_index=True)
    names = [trace.request_ids[r].split(PIECE)[0] for r in requests]
    return RoutedTexts(
        expert_ids_TLK=trace.expert_ids_NLK[order],
        token_T=None if trace.token_N is None else trace.token_N[order],
        starts=np.concatenate([starts, [trace.num_tokens]]).astype(np.int64),
        document=np.unique(names, return_inverse=True)[1].astype(np.int64),
        label=tuple(trace.labels[r] if trace.labels else "" for r in requests),
        num_experts=trace.num_experts,
    )


def check_two_documents(num_documents: int) -> None:
    """Raises TraceError if there are fewer than two documents."""
    if num_documents < 2:
        raise TraceError(
            f"{num_documents} document is too few: training needs at least two, some to "
            "learn from and others to decide when to stop"
        )


def split_documents(texts: RoutedTexts, share: float, seed: int) -> tuple[RoutedTexts, RoutedTexts]:
    """Returns the requests of `share` of the documents (at least one) last, those of the others
    first.

    Raises TraceError if there are fewer than two documents.
    """
    documents = np.unique(texts.document)
    check_two_documents(len(documents))
    shuffled = np.random.default_rng(seed).permutation(documents)
    held_out = shuffled[: max(1, round(share * len(documents)))]
    is_held_out = np.isin(texts.document, held_out)
    return texts.choose(np.flatnonzero(~is_held_out)), texts.choose(np.flatnonzero(is_held_out))
