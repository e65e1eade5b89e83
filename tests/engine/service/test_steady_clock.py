"""The clock of lateness: it follows the engine's, except that a pause counts as a few turns."""

from __future__ import annotations

import pytest

from moe_serve.engine.service.steady_clock import SteadyClock


class Clocks:
    def __init__(self) -> None:
        self.now = 100.0
        self.steady = SteadyClock(lambda: self.now)

    def turn(self, seconds: float) -> None:
        self.now += seconds
        self.steady.turn()


def test_without_pauses_it_is_the_engines_clock() -> None:
    clocks = Clocks()
    for _ in range(50):
        clocks.turn(0.5)
        assert clocks.steady() == clocks.now
        assert clocks.steady.at(clocks.now - 3.0) == clocks.now - 3.0


def test_a_pause_counts_as_one_second_where_turns_are_short() -> None:
    clocks = Clocks()
    for _ in range(50):
        clocks.turn(0.01)
    before = clocks.steady()
    clocks.now += 7.0
    assert clocks.steady() == pytest.approx(before + 1.0), "also before the turn has ended"
    clocks.steady.turn()
    assert clocks.steady() == pytest.approx(before + 1.0)
    clocks.turn(0.01)
    assert clocks.steady() == pytest.approx(before + 1.01)


def test_long_turns_are_no_pauses() -> None:
    clocks = Clocks()
    for _ in range(30):
        clocks.turn(5.0)
    before = clocks.steady()
    clocks.turn(12.0)
    assert clocks.steady() == pytest.approx(before + 12.0)
    clocks.turn(100.0)
    assert clocks.steady() < before + 12.0 + 30.0


def test_idle_time_is_no_pause() -> None:
    clocks = Clocks()
    clocks.turn(0.01)
    clocks.turn(0.01)
    clocks.steady.rest()
    clocks.now += 3600.0
    assert clocks.steady() == clocks.now
    clocks.steady.turn()
    assert clocks.steady() == clocks.now


def test_an_arrival_within_a_pause_is_no_older_than_the_turn() -> None:
    clocks = Clocks()
    for _ in range(20):
        clocks.turn(0.01)
    before = clocks.steady()
    arrival = clocks.now + 3.0
    clocks.now += 7.0
    assert before <= clocks.steady.at(arrival) <= clocks.steady()
    assert clocks.steady.at(clocks.now - 10.0) == pytest.approx(before - 3.0)
