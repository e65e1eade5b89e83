"""Predictions of answer lengths: distributions, censoring, coverage, the guard and the forest."""

from __future__ import annotations

import contextlib
import logging
import os
import time

import numpy as np
import pytest

from moe_serve.engine.service.lengths import length_fit
from moe_serve.engine.service.lengths.censoring import first_bin, hazards_of, label, shares_of
from moe_serve.engine.service.lengths.features import FeatureMaker, RequestFacts
from moe_serve.engine.service.lengths.forest import Forest
from moe_serve.engine.service.lengths.length_bins import (
    NUM_BINS,
    LengthBins,
    LengthDistribution,
    pinball,
)
from moe_serve.engine.service.lengths.length_fit import (
    HereFitter,
    MakeRows,
    ProcessFitter,
    TrainingRows,
    fit,
)
from moe_serve.engine.service.lengths.length_predictor import LengthPredictor
from moe_serve.engine.service.lengths.past_lengths import PastLengths
from moe_serve.engine.service.lengths.trust import Coverage, LengthGuard

BINS = LengthBins(2048)


def facts(kind: int, index: int, tenant: str = "") -> RequestFacts:
    """A prompt whose last token tells how long the answer is."""
    return RequestFacts(prompt_ids=[index % 50, 7, 7, kind], max_tokens=400, tenant=tenant)


class NoFitter(HereFitter):
    """Never has a forest."""

    def start(self, make_rows: MakeRows) -> None:
        """Does nothing."""


class TestDistributions:
    def test_bins_grow_and_cover_all_lengths(self) -> None:
        assert len(BINS.upper_B) == NUM_BINS and BINS.longest == 2048
        assert (np.diff(BINS.upper_B) >= 1).all()
        assert BINS.bins_of([1, 2, 3]).tolist() == [0, 1, 2]
        assert BINS.bins_of([2048, 9999]).tolist() == [NUM_BINS - 1] * 2

    def test_quantiles_of_what_is_left(self) -> None:
        """Half of the answers have 1 token, half are in the last bin."""
        shares = np.zeros(NUM_BINS)
        shares[0] = shares[-1] = 0.5
        found = LengthDistribution(BINS, shares)
        low, high = BINS.lower_B[-1], BINS.upper_B[-1]
        assert found.quantile(0.4) <= 1.0
        assert found.quantile(0.75) == pytest.approx((low + high) / 2)
        assert found.quantile(0.1, so_far=5) == pytest.approx(low + 0.1 * (high - low))
        assert found.quantile(0.5, so_far=2000) == pytest.approx((2000 + high) / 2)
        assert found.quantile(0.5, so_far=5000) > 5000, "longer than all that is known"

    def test_places_are_the_inverse_of_quantiles(self) -> None:
        shares = np.full(NUM_BINS, 1 / NUM_BINS)
        found = LengthDistribution(BINS, shares)
        for level in (0.5, 0.9, 0.99):
            assert found.level_of(round(found.quantile(level))) == pytest.approx(level, abs=0.02)

    def test_pinball_is_least_at_the_quantile(self) -> None:
        lengths = np.sort(np.exp(np.random.default_rng(0).normal(4, 1, 400)))
        losses = {
            level: sum(pinball(lengths[int(400 * level)], each, 0.9) for each in lengths)
            for level in (0.5, 0.8, 0.9, 0.97)
        }
        assert min(losses, key=lambda q: losses[q]) == 0.9


class TestCensoring:
    def test_answers_that_were_cut_tell_that_longer_ones_exist(self) -> None:
        """Half of the answers end after 4 tokens; the others are cut at 8."""
        lengths, is_cut = np.array([4, 8] * 50), np.array([False, True] * 50)
        made = label(BINS, lengths, is_cut)
        weight_B = np.bincount(made.bins, made.weights, minlength=NUM_BINS)
        end, cut = BINS.bins_of([4, 8])
        assert weight_B[end] == 50
        assert weight_B[:cut].sum() == 50, "none of the cut ones ended within 8 tokens"
        assert weight_B.sum() == pytest.approx(100)

    def test_a_cut_inside_a_bin_may_have_ended_there(self) -> None:
        upper = int(BINS.upper_B[-3])
        lengths, is_cut = np.array([upper - 1, upper]), np.array([True, True])
        assert first_bin(BINS, lengths, is_cut).tolist() == [NUM_BINS - 3, NUM_BINS - 2]

    def test_shares_add_up_without_any_answer(self) -> None:
        shares_B = shares_of(hazards_of(np.zeros(NUM_BINS), np.zeros(NUM_BINS)))
        assert shares_B.sum() == pytest.approx(1.0) and shares_B.max() < 0.1

    def test_the_past_of_a_tenant_with_max_tokens_of_8(self) -> None:
        past = PastLengths(BINS)
        for _ in range(100):
            past.note("a", 8, is_cut=True)
        assert past.distribution("a").quantile(0.1) > 8
        for _ in range(100):
            past.note("b", 8, is_cut=False)
        assert past.distribution("b").quantile(0.9) <= 10, "the bin of 8 ends with 10"


class TestPast:
    def test_keys_are_bounded(self) -> None:
        past = PastLengths(BINS, most_keys=10)
        for index in range(1000):
            past.note(f"tenant {index}", 5, is_cut=False)
        assert len(past) == 10 and past.count("tenant 0") == 0 and past.count("tenant 999") > 0

    def test_old_answers_count_less(self) -> None:
        past = PastLengths(BINS)
        for length in [10] * 300 + [500] * 300:
            past.note("a", length, is_cut=False)
        assert past.distribution("a").quantile(0.5) > 400


class TestCoverage:
    def test_a_forecast_that_is_too_short_is_corrected(self) -> None:
        """The ranks of answers are squeezed towards 1, so the distribution is too short."""
        coverage, rng = Coverage(0.9), np.random.default_rng(1)
        places = 1 - rng.random(3000) ** 3
        for place in places:
            coverage.note(float(place), is_within=bool(place <= coverage.taken))
        assert coverage.taken > 0.98
        assert coverage.share == pytest.approx(0.9, abs=0.02)

    def test_it_follows_a_change(self) -> None:
        coverage, rng = Coverage(0.9), np.random.default_rng(2)
        for power in (1.0, 2.5):
            for _ in range(2500):
                place = 1 - rng.random() ** power
                coverage.note(place, is_within=place <= coverage.taken)
        assert coverage.share == pytest.approx(0.9, abs=0.03)


def test_the_guard_follows_only_what_is_better(caplog: pytest.LogCaptureFixture) -> None:
    guard = LengthGuard()
    caplog.set_level(logging.WARNING)
    for _ in range(200):
        guard.measure(1.0, 1.0)
    assert not guard.is_on, "as good as the baseline is not enough"
    for _ in range(400):
        guard.measure(0.5, 1.0)
    assert guard.is_on
    for _ in range(1000):
        guard.measure(1.5, 1.0)
    assert not guard.is_on and guard.num_switches == 2
    assert "switched on" in caplog.text and "switched off" in caplog.text


class TestForest:
    def rows(self, num: int = 600) -> TrainingRows:
        rng = np.random.default_rng(0)
        rows_RF = rng.normal(size=(num, 4))
        bins_R = np.where(rows_RF[:, 1] > 0, 20, 5)
        return TrainingRows(rows_RF=rows_RF, bins_R=bins_R, weights_R=np.ones(num))

    def test_arrays_predict_what_scikit_learn_does(self) -> None:
        from sklearn.ensemble import HistGradientBoostingClassifier

        found: list[HistGradientBoostingClassifier] = []
        real = HistGradientBoostingClassifier.fit

        def kept(self: HistGradientBoostingClassifier, *given: object, **named: object) -> object:
            found.append(self)
            return real(self, *given, **named)

        rows = self.rows()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HistGradientBoostingClassifier, "fit", kept)
            patch.setattr(length_fit, "_ROUNDS", 6)
            forest = Forest.from_bytes(fit(rows).to_bytes())
        expected = found[0].predict_proba(rows.rows_RF)
        assert forest.shares(rows.rows_RF) == pytest.approx(expected, abs=1e-9)
        assert forest.shares(rows.rows_RF[3:4]) == pytest.approx(expected[3:4], abs=1e-9)

    def test_a_process_fits_the_same_forest(self) -> None:
        rows, fitter = self.rows(100), ProcessFitter()
        fitter.start(lambda: rows)
        assert fitter.is_busy
        while fitter.is_busy:
            time.sleep(0.02)
            with contextlib.suppress(AttributeError, OSError):  # it waits behind all other tests
                os.setpriority(os.PRIO_PROCESS, fitter._process.pid, 0)  # type: ignore[union-attr]
        forest = fitter.take()
        assert forest is not None and fitter.take() is None
        assert np.array_equal(forest.shares(rows.rows_RF), fit(rows).shares(rows.rows_RF))

    def test_closing_ends_the_process(self) -> None:
        fitter = ProcessFitter()
        fitter.start(lambda: self.rows(100))
        fitter.close()
        assert not fitter.is_busy and fitter.take() is None


class TestPredictor:
    def test_it_learns_what_the_prompt_tells(self) -> None:
        """Prompts that end with token 1 have answers of about 10 tokens, those with 2 of 200."""
        predictor, rng = LengthPredictor(2048, HereFitter()), np.random.default_rng(3)
        for index in range(420):
            kind = int(rng.integers(1, 3))
            length = int(rng.integers(8, 13) if kind == 1 else rng.integers(150, 260))
            predictor.predict(str(index), facts(kind, index))
            predictor.ended(str(index), length, is_cut=False)
        assert predictor.is_followed
        short = predictor.predict("a", facts(1, 5))
        long = predictor.predict("b", facts(2, 5))
        assert short.p90 < 30 and 100 < long.p50 < 300 and long.p90 >= long.p50

    def test_answers_cut_at_8_tokens_are_not_short_answers(self) -> None:
        predictor = LengthPredictor(2048, HereFitter())
        for index in range(220):
            predictor.predict(str(index), facts(1, index))
            predictor.ended(str(index), 8, is_cut=True)
        predictor.predict("fits", facts(1, 0))
        predictor.ended("fits", 8, is_cut=True)
        forecast = predictor.predict("next", facts(1, 1))
        assert forecast.own is not None, "a forest was fitted"
        for each in (forecast.own, forecast.baseline):
            assert each.quantile(0.1) > 8

    def test_without_a_forest_the_past_of_the_tenant_is_followed(self) -> None:
        predictor = LengthPredictor(2048, NoFitter())
        for index in range(300):
            tenant = ("brief", "wordy")[index % 2]
            predictor.predict(str(index), facts(0, index, tenant))
            predictor.ended(str(index), 20 if tenant == "brief" else 300, is_cut=False)
        assert not predictor.is_followed
        brief, wordy = (predictor.predict(t, facts(0, 0, t)) for t in ("brief", "wordy"))
        assert brief.p50 < 40 and wordy.p50 > 150

    def test_unknown_and_failed_requests_teach_nothing(self) -> None:
        predictor = LengthPredictor(2048, NoFitter())
        predictor.ended("never seen", 5, is_cut=False)
        predictor.predict("a", facts(0, 0))
        predictor.forget("a")
        predictor.ended("a", 5, is_cut=False)
        assert predictor.coverages[0.9].share is None


def test_rows_have_the_same_length_for_all_requests() -> None:
    maker = FeatureMaker(PastLengths(BINS), PastLengths(BINS))
    rows = [
        maker.row(RequestFacts(prompt_ids=[1])),
        maker.row(RequestFacts(prompt_ids=list(range(500)), max_tokens=None, tenant="a")),
    ]
    assert len(rows[0]) == len(rows[1]) and not np.isnan(rows).any()
    assert (rows[0] != rows[1]).any()
