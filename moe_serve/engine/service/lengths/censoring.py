"""Learns from answers that were cut off: their lengths are lower bounds, not lengths.

The share of answers that end in a bin, among those that reach it (its *hazard*), is known from all
answers that reached the bin, whether they were cut off later or not (Kaplan and Meier, 1958). From
the hazards follow the shares of all bins.

For training, an answer that was cut off becomes several rows: one for each bin in which it may have
ended, weighted by these shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.service.lengths.length_bins import NUM_BINS, Floats, Ints, LengthBins

_PRIOR = 0.5  # answers in each bin that are assumed before any is known
_LEAST_WEIGHT = 0.02  # rows of less weight are left out


def hazards_of(ended_B: Floats, reached_B: Floats) -> Floats:
    """Returns the hazards from how many answers ended in each bin and how many reached it. Bins
    that none has reached share what is left evenly."""
    even_B = 1.0 / (NUM_BINS - np.arange(NUM_BINS))
    hazard_B = (ended_B + _PRIOR * even_B) / (reached_B + _PRIOR)
    hazard_B[-1] = 1.0
    return np.asarray(np.clip(hazard_B, 0.0, 1.0))


def shares_of(hazard_B: Floats) -> Floats:
    """Returns the shares of all bins: an answer ends in a bin if it reaches it and ends there."""
    survival_B = np.concatenate([np.ones(1), np.cumprod(1.0 - hazard_B)[:-1]])
    return np.asarray(survival_B * hazard_B)


def first_bin(bins: LengthBins, lengths_R: Ints, is_cut_R: NDArray[np.bool_]) -> Ints:
    """Returns the bin in which an answer ended, or the first in which one that was cut may have."""
    index_R = bins.bins_of(lengths_R)
    is_full_R = is_cut_R & (lengths_R >= bins.upper_B[index_R]) & (index_R < NUM_BINS - 1)
    return np.asarray(index_R + is_full_R)


@dataclass(frozen=True, slots=True)
class Labelled:
    """Rows for training: the number of the answer, the bin, and the weight of each."""

    answers: Ints
    bins: Ints
    weights: Floats


def label(bins: LengthBins, lengths_R: Ints, is_cut_R: NDArray[np.bool_]) -> Labelled:
    """Makes the rows of all answers."""
    first_R = first_bin(bins, lengths_R, is_cut_R)
    reached_B = np.array([np.count_nonzero(first_R >= b) for b in range(NUM_BINS)], np.float64)
    # An answer that was cut inside a bin has not shown whether it would end there.
    unknown_B = np.bincount(first_R[is_cut_R], minlength=NUM_BINS).astype(np.float64)
    ended_B = np.bincount(first_R[~is_cut_R], minlength=NUM_BINS).astype(np.float64)
    shares_B = shares_of(hazards_of(ended_B, reached_B - unknown_B))
    answers, labels, weights = [np.flatnonzero(~is_cut_R)], [first_R[~is_cut_R]], []
    weights.append(np.ones(len(answers[0])))
    for index in np.flatnonzero(is_cut_R):
        rest_B = shares_B.copy()
        rest_B[: first_R[index]] = 0.0
        rest_B /= rest_B.sum()
        kept = np.flatnonzero(rest_B >= _LEAST_WEIGHT)
        answers.append(np.full(len(kept), index))
        labels.append(kept)
        weights.append(rest_B[kept] / rest_B[kept].sum())
    return Labelled(np.concatenate(answers), np.concatenate(labels), np.concatenate(weights))
