"""Limits the time that drafting may waste to a share of the time of the steps."""

from __future__ import annotations

_SHARE = 0.01  # of the time of steps, which the account earns
# Balances in steps: at first and at most, the debt that stops all drafting, and the largest debt.
_MOST_STEPS, _STOP_STEPS, _MOST_DEBT_STEPS = 4.0, 2.0, 6.0
_LONGEST_PAUSE = 64  # steps
_LOOKUP_S = 20e-6  # the time of a lookup before any was measured
_COLD = 2.0  # a step after lookups takes so many lookups longer, because its caches are cold
_WEIGHT = 0.05  # of a new measurement
_MOST_SLOWER = 4.0  # a measurement counts as at most this times the average


class DraftingAllowance:
    """Keeps an account of the time that drafts won and lost against plain steps.

    The account earns a share of the time of every step. It pays for lookups, and for a step with
    drafts it gains or loses the difference to plain steps that make the same progress. What it
    holds is limited, so drafts that have won for long may not lose for long. If it is empty, only
    sequences that are new or gain ask for drafts, and none does if it owes the time of two steps.
    So drafts cost little more than the share, whatever the controller expects of them.
    """

    def __init__(self) -> None:
        self._left_s = 0.0  # in the account
        self._step_s: float | None = None  # of the last step that read no prompt
        self._lookup_s = _LOOKUP_S  # average

    @property
    def may_draft(self) -> bool:
        """True if sequences that are new or gain may have drafts. Before the first step was
        measured there is nothing to compare them with.
        """
        return self._step_s is not None and self._left_s > -_STOP_STEPS * self._step_s

    @property
    def may_look(self) -> bool:
        """True if all other sequences may look as well. They look in the same steps, because a
        draft pays best beside others: the first of a step makes it longer by work that the others
        share.
        """
        return self._left_s > 0.0

    @property
    def pause(self) -> int:
        """Returns the number of steps until all sequences may look. If all drafting has stopped, it
        is the number until sequences whose drafts gain may continue."""
        if self._step_s is None:
            return 0
        debt_s = -self._left_s - (0.0 if self.may_draft else _STOP_STEPS * self._step_s)
        return min(_LONGEST_PAUSE, max(0, int(debt_s / (_SHARE * self._step_s))))

    def pay_lookups(self, num: int, seconds: float) -> float:
        """Pays for lookups that took so many seconds, and returns what they cost. Time far above
        the average is not charged: the process had to wait for the CPU.
        """
        seconds = min(seconds, max(1, num) * _MOST_SLOWER * self._lookup_s)
        cost_s = seconds + (_COLD * self._lookup_s if num else 0.0)
        self._left_s -= cost_s
        if num:
            self._lookup_s += _WEIGHT * (seconds / num - self._lookup_s)
        return cost_s

    def earn(self, seconds: float) -> None:
        """Earns from a step that read a prompt."""
        if self._step_s is not None:
            self._add(_SHARE * seconds, self._step_s)

    def settle(self, num_steps: int, step_s: float, won_s: float) -> None:
        """Earns from decode steps, and settles what their drafts won. `step_s` is the time of a
        step without drafts, and `won_s` the time by which plain steps would have taken longer for
        the same progress; negative if they would have been faster."""
        if self._step_s is None:
            self._left_s += _MOST_STEPS * step_s
        self._step_s = step_s
        self._add(_SHARE * num_steps * step_s + won_s, step_s)

    def _add(self, seconds: float, step_s: float) -> None:
        left_s = min(self._left_s + seconds, _MOST_STEPS * step_s)
        self._left_s = max(left_s, -_MOST_DEBT_STEPS * step_s)
