"""Silences, against a clock that the test turns."""

from __future__ import annotations

from moe_serve.cluster.members.roster import Heartbeats, Silence


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_late_after_three_periods_and_longest_first() -> None:
    clock = Clock()
    beats: Heartbeats[int] = Heartbeats(1.0, 3, clock)
    assert beats.late() == []
    assert beats.next_check_s() == 3.0
    beats.beat(0)  # at 100: late from 103
    clock.now_s = 101.0
    beats.beat(1)  # late from 104
    assert beats.next_check_s() == 2.0
    clock.now_s = 102.9
    assert beats.late() == []
    clock.now_s = 103.0
    assert beats.late() == [Silence(0, 3.0)]
    clock.now_s = 105.5
    assert beats.late() == [Silence(0, 5.5), Silence(1, 4.5)]
    assert beats.next_check_s() == 0.0


def test_a_beat_ends_the_silence_and_forget_the_watch() -> None:
    clock = Clock()
    beats: Heartbeats[str] = Heartbeats(0.5, 2, clock)
    beats.beat("expert 0")
    beats.beat("expert 1")
    clock.now_s += 1.0
    beats.beat("expert 0")
    beats.forget("expert 1")
    beats.forget("expert 1")
    assert beats.late() == [], "one has spoken and the other is not expected"
    clock.now_s += 1.0
    assert beats.late() == [Silence("expert 0", 1.0)]


def test_a_listener_that_was_away_excuses_all() -> None:
    clock = Clock()
    beats: Heartbeats[int] = Heartbeats(1.0, 3, clock)
    beats.beat(0)
    clock.now_s += 60.0  # this process was stopped; what was sent meanwhile is not read yet
    beats.excuse()
    assert beats.late() == []
    clock.now_s += 3.0
    assert beats.late() == [Silence(0, 3.0)], "it was given the whole time again"
