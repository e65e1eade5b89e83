"""Limits the time that drafting may waste to a share of the time of the steps."""

from __future__ import annotations

from dataclasses import dataclass

_ROW_SHARE, _LOOKUP_SHARE = 0.005, 0.012  # of the time of steps, which the accounts earn
_SAVED_SHARE = 0.25  # of the time that accepted tokens saved, which pays for more lookups
_ROW_STEPS, _LOOKUP_STEPS = 4.0, 8.0  # steps whose time the accounts hold at most
_FIRST_ROW_STEPS, _FIRST_LOOKUP_STEPS = 2.0, 1.0  # and at first
_MOST_DEBT_STEPS = 1.0  # below zero
_LONGEST_PAUSE = 64  # steps
_LOOKUP_S = 20e-6  # the time of a lookup before any was measured
_COLD = 2.0  # lookups by whose time a step is longer that was behind some: its caches are cold
_WEIGHT = 0.05  # of a new measurement
_MOST_SLOWER = 4.0  # a measurement counts as at most this times the average


@dataclass(slots=True)
class _Account:
    """A balance of seconds that may be spent. It is negative after spending too much."""

    most_steps: float
    left_s: float = 0.0

    def add(self, seconds: float, step_s: float) -> None:
        """Adds seconds, up to the time of `most_steps` steps. A debt above that of one step is
        forgiven, so that better drafts need not wait for long."""
        left_s = min(self.left_s + seconds, self.most_steps * step_s)
        self.left_s = max(left_s, -_MOST_DEBT_STEPS * step_s)


class DraftingAllowance:
    """Keeps two accounts of an engine's time: for looking for drafts, and for verifying them.

    Each earns a share of the time of every step. A lookup costs its own time, and a refused token
    the time by which its row made the step longer. An accepted token earns what it saved. So drafts
    that are worth their time are never limited, and drafts that are never right cost at most about
    the two shares, whatever the controller expects of them.
    """

    def __init__(self) -> None:
        self._rows, self._lookups = _Account(_ROW_STEPS), _Account(_LOOKUP_STEPS)
        self._step_s: float | None = None  # of the last step that read no prompt
        self._lookup_s = _LOOKUP_S  # average

    @property
    def has_rows(self) -> bool:
        """True if drafts may be verified."""
        return self._step_s is None or self._rows.left_s > 0.0

    @property
    def has_spare_rows(self) -> bool:
        """True if even drafts that promise no gain may be verified."""
        return self._step_s is None or self._rows.left_s > 0.5 * _ROW_STEPS * self._step_s

    @property
    def pause(self) -> int:
        """Returns the number of steps until an empty account has earned enough to ask for drafts
        again.
        """
        if self._step_s is None:
            return 0
        rows_s, lookup_s = -self._rows.left_s, -self._lookups.left_s
        wait = max(rows_s / _ROW_SHARE, lookup_s / _LOOKUP_SHARE) / self._step_s
        return min(_LONGEST_PAUSE, max(0, int(wait)))

    @property
    def has_lookups(self) -> bool:
        """True if all sequences may look. They look in the same steps, because a draft pays best
        beside others: the first of a step makes it longer by work that the others share.
        """
        return self._step_s is None or self._lookups.left_s > 0.0

    def pay_lookups(self, num: int, seconds: float) -> None:
        """Pays for lookups that took so many seconds. Time far above the average is not charged:
        the process had to wait for the CPU.
        """
        seconds = min(seconds, max(1, num) * _MOST_SLOWER * self._lookup_s)
        self._lookups.left_s -= seconds
        if num:
            self._lookups.left_s -= _COLD * self._lookup_s
            self._lookup_s += _WEIGHT * (seconds / num - self._lookup_s)

    def earn(self, seconds: float) -> None:
        """Earns from a step that read a prompt."""
        if self._step_s is not None:
            self._rows.add(_ROW_SHARE * seconds, self._step_s)
            self._lookups.add(_LOOKUP_SHARE * seconds, self._step_s)

    def settle(self, num_steps: int, step_s: float, saved_s: float, lost_s: float) -> None:
        """Earns from decode steps, and pays for their drafts. `step_s` is the time of a step
        without drafts, `saved_s` what accepted tokens saved, and `lost_s` the time of refused
        tokens."""
        if self._step_s is None:
            self._rows.left_s = _FIRST_ROW_STEPS * step_s
            self._lookups.left_s += _FIRST_LOOKUP_STEPS * step_s
        self._step_s = step_s
        time_s = num_steps * step_s
        self._rows.add(_ROW_SHARE * time_s + saved_s - lost_s, step_s)
        self._lookups.add(_LOOKUP_SHARE * time_s + _SAVED_SHARE * saved_s, step_s)
