"""When steps end that share a machine, and steps that do not."""

from __future__ import annotations

import pytest

from moe_serve.simulate.step_ends import OwnMachines, SharedMachine


def test_two_steps_slow_each_other_down_while_both_run() -> None:
    """Two cells take 0.75 of the machine each, so steps go on at 1 / 1.5 of their speed."""
    ends = SharedMachine({0: 0.75, 1: 0.75})
    ends.put(0, 1.0, now=0.0)
    assert ends.next_end(0) == 1.0 and ends.next_end(1) is None, "one alone is not slowed down"
    ends.put(1, 2.0, now=0.5)
    assert ends.next_end(0) == pytest.approx(0.5 + 0.5 * 1.5)
    assert ends.take(0) == (0.0, pytest.approx(1.25))
    assert ends.next_end(1) == pytest.approx(1.25 + 1.5), "1.5 s are left, and it is alone"


def test_a_step_that_was_sent_ahead_begins_when_the_one_before_ends() -> None:
    for ends in (SharedMachine({0: 0.5, 1: 0.5}), OwnMachines()):
        ends.put(0, 1.0, now=0.0)
        ends.put(0, 0.5, now=0.2)
        assert (ends.next_end(0), ends.last_end(0)) == (pytest.approx(1.0), pytest.approx(1.5))
        assert ends.take(0) == (0.0, pytest.approx(1.0))
        assert ends.take(0) == (pytest.approx(1.0), pytest.approx(1.5))
        assert ends.next_end(0) is None and ends.last_end(0) is None
