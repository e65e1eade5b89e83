"""Limits the time that drafting may waste to a share of the time of the steps."""

from __future__ import annotations

from dataclasses import dataclass

_SHARE = 0.01  # of the time of steps, which an account earns
_LONGEST_PAUSE = 64  # steps
_LOOKUP_S = 20e-6  # the time of a lookup before any was measured
_COLD = 2.0  # a step after lookups takes so many lookups longer, because its caches are cold
_WEIGHT = 0.05  # of a new measurement
_MOST_SLOWER = 4.0  # a measurement counts as at most this times the average


@dataclass(slots=True)
class _Account:
    """Time that drafts have won and may lose. All limits are in plain steps."""

    first: float  # what it holds at first
    most: float  # what it may hold
    stop: float  # the debt that stops all drafting
    most_debt: float = 6.0
    left_s: float = 0.0

    def add(self, seconds: float, step_s: float) -> None:
        left_s = min(self.left_s + seconds, self.most * step_s)
        self.left_s = max(left_s, -self.most_debt * step_s)


class DraftingAllowance:
    """Keeps an account of the time that drafts won and lost against plain steps.

    The account earns a share of the time of every step. It pays for lookups, and for a step with
    drafts it gains or loses the difference to plain steps that make the same progress. What it
    holds is limited, so drafts that have won for long may not lose for long. If it is empty, only
    sequences that are new or gain ask for drafts, and none does if it owes the time of two steps.
    So drafts cost little more than the share, whatever the controller expects of them.

    Steps in which every draft is a client's prediction have an account of their own, which holds
    more: these drafts are long, a wrong one takes the time of up to ten plain steps, and right ones
    follow behind it.
    """

    def __init__(self) -> None:
        self._texts = _Account(first=4.0, most=4.0, stop=2.0)
        self._predictions = _Account(first=8.0, most=48.0, stop=4.0)
        self._step_s: float | None = None  # of the last step that read no prompt
        self._lookup_s = _LOOKUP_S  # average

    @property
    def may_draft(self) -> bool:
        """True if sequences that are new or gain may have drafts. Before the first step was
        measured there is nothing to compare them with.
        """
        return self._is_open(self._texts)

    @property
    def may_follow(self) -> bool:
        """True if sequences may have drafts from their client's prediction."""
        return self._is_open(self._predictions)

    @property
    def may_look(self) -> bool:
        """True if all other sequences may look as well. They look in the same steps, because a
        draft pays best beside others: the first of a step makes it longer by work that the others
        share.
        """
        return self._texts.left_s > 0.0

    @property
    def pause(self) -> int:
        """Returns the number of steps until all sequences may look. If all drafting has stopped, it
        is the number until sequences whose drafts gain may continue."""
        if self._step_s is None:
            return 0
        owed_s = 0.0 if self.may_draft else self._texts.stop * self._step_s
        debt_s = -self._texts.left_s - owed_s
        return min(_LONGEST_PAUSE, max(0, int(debt_s / (_SHARE * self._step_s))))

    def pay_lookups(self, num: int, seconds: float, *, by_predictions: bool = False) -> float:
        """Pays for lookups that took so many seconds, and returns what they cost. Time far above
        the average is not charged: the process had to wait for the CPU. `by_predictions`: only
        predictions were looked at.
        """
        seconds = min(seconds, max(1, num) * _MOST_SLOWER * self._lookup_s)
        cost_s = seconds + (_COLD * self._lookup_s if num else 0.0)
        (self._predictions if by_predictions else self._texts).left_s -= cost_s
        if num:
            self._lookup_s += _WEIGHT * (seconds / num - self._lookup_s)
        return cost_s

    def earn(self, seconds: float) -> None:
        """Earns from a step that read a prompt."""
        if self._step_s is not None:
            for account in (self._texts, self._predictions):
                account.add(_SHARE * seconds, self._step_s)

    def settle(
        self, num_steps: int, step_s: float, won_s: float, *, by_predictions: bool = False
    ) -> None:
        """Earns from decode steps, and settles what their drafts won. `step_s` is the time of a
        step without drafts, and `won_s` the time by which plain steps would have taken longer for
        the same progress; negative if they would have been faster. `by_predictions`: every draft
        was a prediction."""
        for account in (self._texts, self._predictions):
            if self._step_s is None:
                account.left_s += account.first * step_s
            has_won = by_predictions is (account is self._predictions)
            earned_s = _SHARE * num_steps * step_s
            account.add(earned_s + won_s if has_won else earned_s, step_s)
        self._step_s = step_s

    def _is_open(self, account: _Account) -> bool:
        return self._step_s is not None and account.left_s > -account.stop * self._step_s
