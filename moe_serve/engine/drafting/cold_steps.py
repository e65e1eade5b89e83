"""Estimates by how much drafts make the plain steps behind them longer."""

from __future__ import annotations

from math import exp, log

_COLD_STEPS = 3  # plain steps behind one with drafts that are clearly longer than others
_MOST_FACTOR = 2.5  # of a cold step, over a warm one
_WEIGHT = 0.1  # least weight of a new measurement, as a logarithm
_UNCERTAIN = 0.1  # of that logarithm, which may be noise
_FIRST_LIMIT, _LAST_LIMIT = 16, 256  # steps without a warm plain one, after which one is due


class ColdSteps:
    """Compares plain steps behind one with drafts to the first one that is no longer affected.

    A step with drafts moves the weights that plain steps need out of the caches. The next plain
    step of the demonstration model takes up to 70% longer, and two more take up to 20% longer. What
    drafts gain is their gain over steps with warm caches, as all steps would be without drafts.

    Factors are measured within one run of plain steps, so a machine that becomes slower does not
    change them. They are kept by the number of sequences, in powers of two.
    """

    def __init__(self) -> None:
        self._logs: dict[int, list[float]] = {}  # of factors, by the bits of the number
        self._num_runs: dict[int, int] = {}  # that were measured, likewise
        self.is_warm = True  # no plain step is affected
        self._run: list[float] = []  # plain steps behind drafts, unless caches are warm
        self._num_since = 0  # steps since the last warm plain one
        self._limit = _FIRST_LIMIT

    @property
    def is_due(self) -> bool:
        """True if plain steps should follow each other until the caches are warm, because no step
        had warm caches for long."""
        return not self.is_warm and bool(self._run) and self._num_since >= self._limit

    def factor(self, num_sequences: int) -> float:
        """Returns the time of a plain step that would come next, over that with warm caches."""
        if self.is_warm or len(self._run) >= _COLD_STEPS:
            return 1.0
        known = self._logs.get(num_sequences.bit_length())
        return 1.0 if known is None else exp(max(0.0, known[len(self._run)] - _UNCERTAIN))

    def note_drafts(self) -> None:
        """Notes a step with drafts."""
        self._num_since += 1
        self.is_warm, self._run = False, []

    def note_plain(self, num_sequences: int, seconds: float, num_steps: int) -> None:
        """Notes the mean time of some plain steps, unless caches are warm."""
        run, self._num_since = self._run, self._num_since + num_steps
        if len(run) + num_steps <= _COLD_STEPS:
            run += [seconds] * num_steps
            return
        if len(run) == _COLD_STEPS:
            self._learn(num_sequences.bit_length(), run, seconds)
        if self._num_since >= self._limit:
            self._limit = min(2 * self._limit, _LAST_LIMIT)
        self.is_warm, self._num_since = True, 0

    def _learn(self, key: int, run: list[float], warm_s: float) -> None:
        known = self._logs.setdefault(key, [0.0] * _COLD_STEPS)
        num = self._num_runs[key] = self._num_runs.get(key, 0) + 1
        for place, seconds in enumerate(run):
            found = log(min(max(seconds / warm_s, 1 / _MOST_FACTOR), _MOST_FACTOR))
            known[place] += max(_WEIGHT, 1 / num) * (found - known[place])
