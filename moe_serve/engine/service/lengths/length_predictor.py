"""Predicts the length of an answer, and learns from every answer that ends.

    arrival    features -> forest -> shares of bins -> P50, P90 (corrected by `Coverage`)
    end        the tenant's and the beginning's past, the coverage, the guard, and a reservoir
    sometimes  a fit of the reservoir in another process, whose forest replaces the one before

The past answers of tenants are the prediction until a forest is better (`LengthGuard`).
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from moe_serve.engine.service.lengths.censoring import label
from moe_serve.engine.service.lengths.features import FeatureMaker, RequestFacts
from moe_serve.engine.service.lengths.forest import Forest
from moe_serve.engine.service.lengths.length_bins import (
    Floats,
    LengthBins,
    LengthDistribution,
    pinball,
)
from moe_serve.engine.service.lengths.length_fit import Fitter, TrainingRows
from moe_serve.engine.service.lengths.past_lengths import PastLengths
from moe_serve.engine.service.lengths.trust import Coverage, LengthGuard

LEVELS = (0.5, 0.9)
_RESERVOIR = 20_000
_FIRST_FIT, _GROWTH = 200, 1.5  # answers before the first fit; later fits after so many times more
_MOST_BETWEEN = 2000  # answers between two fits
_MOST_OPEN = 20_000  # requests whose answers are awaited


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthForecast:
    """The distribution that is followed, and the corrected P50 and P90. Distributions of the
    forest and of the tenant's past are kept to be compared."""

    followed: LengthDistribution
    p50: float
    p90: float
    own: LengthDistribution | None
    baseline: LengthDistribution


@dataclass(frozen=True, slots=True)
class _Open:
    """A request whose answer is awaited."""

    tenant: str
    beginning: str
    row: Floats
    forecast: LengthForecast


class LengthPredictor:
    """Predicts and learns on one thread."""

    def __init__(self, longest: int, fitter: Fitter) -> None:
        self.bins = LengthBins(longest)
        self._tenants, self._beginnings = PastLengths(self.bins), PastLengths(self.bins)
        self._features = FeatureMaker(self._tenants, self._beginnings)
        self._fitter, self._random = fitter, random.Random(0)
        self._forest: Forest | None = None
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._kept: list[tuple[Floats, int, bool]] = []
        self._num_ended = 0
        self._next_fit = _FIRST_FIT
        self.guard = LengthGuard()
        self.coverages = {level: Coverage(level) for level in LEVELS}
        self.num_begun = 0  # fits

    @property
    def is_followed(self) -> bool:
        """True if the forest is followed, not the past of tenants."""
        return self._forest is not None and self.guard.is_on

    def predict(self, request_id: str, facts: RequestFacts) -> LengthForecast:
        """Predicts the answer of a request that arrived. `ended` must be called at its end."""
        row = self._features.row(facts)
        baseline = self._tenants.distribution(facts.tenant)
        own = None
        if self._forest is not None:
            own = LengthDistribution(self.bins, self._forest.shares(row[None])[0])
        followed = own if own is not None and self.guard.is_on else baseline
        p50, p90 = (followed.quantile(self.coverages[level].taken) for level in LEVELS)
        forecast = LengthForecast(
            followed=followed, p50=p50, p90=max(p50, p90), own=own, baseline=baseline
        )
        self._open[request_id] = _Open(facts.tenant, facts.beginning, row, forecast)
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return forecast

    def forget(self, request_id: str) -> None:
        """Forgets a request that failed, because its answer says nothing about lengths."""
        self._open.pop(request_id, None)

    def ended(self, request_id: str, length: int, *, is_cut: bool) -> None:
        """Learns from an answer. `is_cut`: max_tokens, the context or the client ended it."""
        found = self._open.pop(request_id, None)
        if found is None or length < 1:
            return
        self._judge(found.forecast, length, is_cut)
        self._tenants.note(found.tenant, length, is_cut=is_cut)
        self._beginnings.note(found.beginning, length, is_cut=is_cut)
        self._keep((found.row, length, is_cut))
        self._refit()

    def _judge(self, forecast: LengthForecast, length: int, is_cut: bool) -> None:
        """Compares a forecast with the answer. One that was cut off is within a quantile if that is
        not shorter; its place in the distribution is drawn from those that it leaves possible."""
        place = forecast.followed.level_of(length)
        if is_cut:
            place += (1.0 - place) * self._random.random()
        for level, quantile in zip(LEVELS, (forecast.p50, forecast.p90), strict=True):
            self.coverages[level].note(place, is_within=length <= round(quantile))
        own = forecast.own
        if own is not None and not is_cut:
            losses = [
                sum(pinball(each.quantile(level), length, level) for level in LEVELS)
                for each in (own, forecast.baseline)
            ]
            self.guard.measure(losses[0], losses[1])

    def _keep(self, answer: tuple[Floats, int, bool]) -> None:
        """Puts an answer into the reservoir, in the place of a random one if it is full."""
        self._num_ended += 1
        if len(self._kept) < _RESERVOIR:
            self._kept.append(answer)
        else:
            self._kept[self._random.randrange(_RESERVOIR)] = answer

    def _refit(self) -> None:
        forest = self._fitter.take()
        if forest is not None:
            self._forest = forest  # one assignment: a prediction sees the old one or the new one
        if self._num_ended >= self._next_fit and not self._fitter.is_busy:
            step = min(int(self._num_ended * (_GROWTH - 1)), _MOST_BETWEEN)
            self._next_fit = self._num_ended + max(step, _FIRST_FIT)
            self.num_begun += 1
            self._fitter.start(partial(self._training_rows, list(self._kept)))

    def _training_rows(self, kept: Sequence[tuple[Floats, int, bool]]) -> TrainingRows:
        rows_RF = np.stack([row for row, _, _ in kept])
        lengths_R = np.array([length for _, length, _ in kept], dtype=np.int64)
        is_cut_R = np.array([is_cut for _, _, is_cut in kept])
        labelled = label(self.bins, lengths_R, is_cut_R)
        return TrainingRows(
            rows_RF=rows_RF[labelled.answers], bins_R=labelled.bins, weights_R=labelled.weights
        )

    def close(self) -> None:
        """Ends a fit that runs."""
        self._fitter.close()
