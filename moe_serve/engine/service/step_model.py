"""Predicts the seconds of a step from its rows, as fitted to the steps that ran.

seconds = fixed + decode rows x a + prompt tokens x b + context of the decode rows x c
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np

_SCALES = np.array([1.0, 16.0, 256.0, 4096.0])  # so that all features are about 1
_DECAY = 0.99  # of old steps, at each new one
_RIDGE = 1e-4  # of the newest step's weight: keeps costs small that were never varied
_MOST_SLOWER = 3.0  # a step counts as at most this times the prediction or the usual step
_USUAL_WEIGHT = 0.05  # of a new step in the usual seconds
_NUM_WARM = 8  # steps before a prediction limits a measurement
_REFIT_EVERY = 4  # steps
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step, over all attention ranks."""

    num_decoding: int = 0
    num_prompt: int = 0  # prompt tokens
    num_context: int = 0  # tokens in the contexts of those that decode

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.num_decoding + other.num_decoding,
            self.num_prompt + other.num_prompt,
            self.num_context + other.num_context,
        )


class StepModel(Protocol):
    """Predicts the times of steps for the scheduler. A simulator may give its own cost model."""

    @property
    def is_measured(self) -> bool: ...

    def seconds(self, rows: StepWork) -> float:
        """Predicts a step; never less for more rows."""
        ...

    def observe(self, rows: StepWork, seconds: float) -> None:
        """Learns from a step that ran."""
        ...


class FittedSteps:
    """Implements StepModel by least squares with decaying weights and no negative cost."""

    def __init__(self) -> None:
        self._a_FF = np.zeros((4, 4))
        self._b_F = np.zeros(4)
        self._costs: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)  # of the features, unscaled
        self._usual_s = 0.0  # of recent steps
        self._num_observed = 0

    @property
    def is_measured(self) -> bool:
        return self._num_observed > 0

    def seconds(self, rows: StepWork) -> float:
        fixed, decode, prompt, context = self._costs
        return (
            fixed
            + decode * rows.num_decoding
            + prompt * rows.num_prompt
            + context * rows.num_context
        )

    def observe(self, rows: StepWork, seconds: float) -> None:
        """See `StepModel.observe`. Each step counts relative to its length."""
        seconds = max(seconds, _LEAST_S)
        if self._num_observed >= _NUM_WARM:
            # A prediction may be near zero: rows of a kind that no step had yet cost nothing.
            seconds = min(seconds, _MOST_SLOWER * max(self.seconds(rows), self._usual_s))
        self._usual_s += (_USUAL_WEIGHT if self._usual_s else 1.0) * (seconds - self._usual_s)
        values = (1.0, rows.num_decoding, rows.num_prompt, rows.num_context)
        x_F = np.array(values) / _SCALES / seconds
        self._a_FF = _DECAY * self._a_FF + np.outer(x_F, x_F)
        self._b_F = _DECAY * self._b_F + x_F
        self._num_observed += 1
        if self._num_observed <= _NUM_WARM or self._num_observed % _REFIT_EVERY == 0:
            self._fit(float(x_F @ x_F))

    def _fit(self, weight: float) -> None:
        used = [0, 1, 2, 3]
        found = np.zeros(4)
        while used:
            a = self._a_FF[np.ix_(used, used)] + _RIDGE * weight * np.eye(len(used))
            solved = np.linalg.solve(a, self._b_F[used])
            if solved.min() >= 0.0:
                found[used] = solved
                break
            del used[int(solved.argmin())]
        self._costs = tuple((found / _SCALES).tolist())


def prompt_token_s(
    model: StepModel, num_decoding: int, num_prompt: int, num_context: int = 0
) -> float:
    """Returns the seconds that a prompt token takes in steps that read `num_prompt` of them, beside
    rows that decode with `num_context` tokens in their contexts."""
    return model.seconds(StepWork(num_decoding, num_prompt, num_context)) / max(1, num_prompt)


def work_s(model: StepModel, counts: Items[int]) -> tuple[float, float]:
    """Returns the seconds that one prompt token and one decode row add to a step with the largest
    of these counts (prompt tokens, decode rows). Both share the step's fixed time evenly."""
    num_prompt, num_decoding = counts
    prompt = model.seconds(StepWork(0, num_prompt)) / max(1, num_prompt)
    decode = model.seconds(StepWork(num_decoding, 0)) / max(1, num_decoding)
    return prompt, decode
