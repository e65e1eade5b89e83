"""Maintains signatures while a server runs, from a predictor, from past choices, or from both.

A predictor knows a request before its first step, so it helps to choose the next one to start; a
request's choices are known once its prompt is read. Both cost time between steps, so a step
refreshes only as many signatures as fit its share, those that need it most first.

R requests, L layers, E experts, K choices, N tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.routes.route_records import RouteRecord
from moe_serve.engine.schedule.policy.concave_cost import Floats
from moe_serve.engine.schedule.policy.live_learning import LiveLearning
from moe_serve.engine.schedule.policy.signature_table import SignatureTable
from routing_predictor.layers.recall_guard import RecallGuard
from routing_predictor.requests.history import ChoiceHistory
from routing_predictor.requests.request_mlp import RequestPredictor

_SHARE_S = 1e-3  # per step, for all engines of a server
_LARGEST_PREFIX = 512  # tokens that a predictor is given
_WEIGHT = 0.2  # weight of a new time measurement
_LEAST_S = 1e-9  # of one signature, if the clock stands still
_DECODE_STRIDE = 4  # one in this many decode steps of a request is observed
_MOST_OBSERVED = 128  # observed tokens of a prompt's chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedPredictor:
    """A predictor, and how far it is trusted."""

    predictor: RequestPredictor
    guard: RecallGuard
    is_acting: bool  # False: only measured
    learning: LiveLearning | None = None  # None: it does not learn


class LiveSignatures:
    """Implements SignatureSource and RouteListener; one for all engines of a server."""

    has_weights = False

    def __init__(
        self,
        table: SignatureTable,
        num_experts: int,
        followed: FollowedPredictor | None,
        refresh_tokens: int,
        num_engines: int = 1,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        """`num_engines` share this object and its time."""
        self._clock = clock
        self._table, self._followed, self._refresh = table, followed, refresh_tokens
        self._history = ChoiceHistory(num_experts)
        self._made_at: dict[int, int] = {}  # sequence id -> its tokens when its signature was made
        self._is_due: set[int] = set()  # their choices became known after it was made
        self._predicted: dict[int, Floats] = {}  # [L, E], predictions by sequence id
        self._best: dict[int, NDArray[np.bool_]] = {}  # [L, E]: the K best of each prediction
        self._share_s = _SHARE_S / num_engines
        self._seconds_each = _SHARE_S / 4  # until it is measured

    @property
    def is_on(self) -> bool:
        followed = self._followed
        return followed is None or not followed.is_acting or followed.guard.is_on

    @property
    def recall(self) -> float | None:
        return None if self._followed is None else self._followed.guard.recall

    @property
    def has_predictor(self) -> bool:
        return self._followed is not None

    @property
    def num_learnt(self) -> int | None:
        learning = self._learning
        return None if learning is None else learning.num_learnt

    @property
    def _learning(self) -> LiveLearning | None:
        return None if self._followed is None else self._followed.learning

    def refresh(self, waiting: Items[Sequence], running: Items[Sequence]) -> None:
        """See `SignatureSource.refresh`."""
        if self._learning is not None:
            self._learning.learn()
        most = max(1, int(self._share_s / self._seconds_each))
        due = []
        for sequence in self._due(waiting, running):
            due.append(sequence)
            if len(due) == most:
                break
        if not due:
            return
        since = self._clock()
        self._make(due)
        seconds = max(_LEAST_S, (self._clock() - since) / len(due))
        self._seconds_each += _WEIGHT * (seconds - self._seconds_each)

    def wants(self, step: int, sequences: Mapping[int, Sequence]) -> Collection[int]:
        """See `RouteListener.wants`. Wants prompts and a sample of the decode steps."""
        return [
            key
            for key, sequence in sequences.items()
            if (step + key) % _DECODE_STRIDE == 0 or sequence.num_pending_tokens > 1
        ]

    def take(self, records: list[RouteRecord]) -> None:
        """See `RouteListener.take`."""
        self._measure(records)
        for record in records:
            if record.sequence_id not in self._history:  # its first known choices
                self._is_due.add(record.sequence_id)
        parts = [record.expert_ids_NLK[-_MOST_OBSERVED:] for record in records]
        self._history.observe([record.sequence_id for record in records], parts)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        gone = list(sequence_ids)
        self._history.forget(gone)
        self._table.forget(gone)
        self._is_due.difference_update(gone)
        if self._learning is not None:
            self._learning.end(gone)
        for key in gone:
            for known in (self._made_at, self._predicted, self._best):
                known.pop(key, None)

    def _due(self, waiting: Items[Sequence], running: Items[Sequence]) -> Iterator[Sequence]:
        made_at, refresh = self._made_at, self._refresh
        if self._followed is not None:
            yield from (s for s in waiting if s.id not in made_at)
        for sequence in running:
            since = made_at.get(sequence.id)
            is_old = since is None or sequence.num_tokens - since >= refresh
            is_old = is_old or sequence.id in self._is_due
            if is_old and (self._followed is not None or sequence.id in self._history):
                yield sequence

    def _make(self, sequences: list[Sequence]) -> None:
        keys, prior = [s.id for s in sequences], None
        if self._followed is not None:
            prefixes = [np.array(s.token_ids[-_LARGEST_PREFIX:], np.int64) for s in sequences]
            predicted = self._followed.predictor.predict(prefixes)
            self._predicted |= dict(zip(keys, predicted, strict=True))
            for key, predicted_LE in zip(keys, predicted, strict=True):
                self._best.pop(key, None)
                if self._learning is not None:
                    self._learning.predicted(key, predicted_LE)
            prior = predicted if self._followed.is_acting else None
        self._made_at |= {s.id: s.num_tokens for s in sequences}
        self._is_due.difference_update(keys)
        signatures = self._history.signatures(keys, prior)
        if signatures is not None:
            self._table.put(keys, signatures)

    def _measure(self, records: list[RouteRecord]) -> None:
        """Measures the recall at K, the share of later choices among the K best predicted, and
        records the choices for learning."""
        if self._followed is None:
            return
        shares, num_tokens = 0.0, 0
        for record in records:
            if record.sequence_id not in self._predicted:
                continue
            after = self._made_at[record.sequence_id] - record.start
            ids_NLK = record.expert_ids_NLK[max(0, after) :]
            if not len(ids_NLK):
                continue
            best_LE = self._best_of(record.sequence_id, ids_NLK.shape[2])
            layers = np.arange(len(best_LE))[:, None]
            shares += float(best_LE[layers, ids_NLK].mean()) * len(ids_NLK)
            num_tokens += len(ids_NLK)
            if self._learning is not None:
                self._learning.chose(record.sequence_id, ids_NLK)
        if num_tokens:
            self._followed.guard.measure(shares / num_tokens, num_tokens)

    def _best_of(self, key: int, top_k: int) -> NDArray[np.bool_]:
        """Returns the K best predicted experts, cached because a prediction is measured many
        times."""
        best_LE = self._best.get(key)
        if best_LE is None:
            predicted_LE = self._predicted[key]
            floor_L = np.partition(predicted_LE, -top_k, axis=1)[:, -top_k]
            best_LE = self._best[key] = np.asarray(predicted_LE >= floor_L[:, None])
        return best_LE
