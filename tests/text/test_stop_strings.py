"""The matcher gives the same text for every cut into pieces."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.text.stop_strings import StopStringMatcher, StopStrings

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def reference(text: str, stops: list[str], includes_stop: bool) -> tuple[str, str | None]:
    """Finds the first stop string to be complete; of two that end together, the longer one."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if includes_stop else end - len(stop)], stop
    return text, None


def feed(matcher: StopStringMatcher, pieces: list[str]) -> str:
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.matched is not None:
            return "".join(shown)
    return "".join(shown) + matcher.flush()


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(st.text("abc", max_size=6), max_size=8), stops=STOPS, keeps=st.booleans())
def test_any_split_gives_the_same_text(pieces: list[str], stops: list[str], keeps: bool) -> None:
    matcher = StopStringMatcher(StopStrings(stops), includes_stop=keeps)
    shown = feed(matcher, pieces)
    assert (shown, matcher.matched) == reference("".join(pieces), stops, keeps)


@settings(max_examples=200, deadline=None)
@given(text=st.text("abc", max_size=20), stops=STOPS)
def test_exactly_the_possible_beginning_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(StopStrings(stops))
    shown = matcher.push(text)
    if matcher.matched is None:
        held = text[len(shown) :]
        beginnings = {stop[:k] for stop in stops for k in range(len(stop))} | {""}
        assert held == max((b for b in beginnings if text.endswith(b)), key=len)


def test_an_unarmed_match_is_text_and_a_later_one_counts() -> None:
    matcher = StopStringMatcher(StopStrings(["END"]))
    assert matcher.push("xENDyEN", is_armed=False) == "xENDy"
    assert matcher.push("Dz") == ""
    assert matcher.matched == "END"


def test_hostile_stop_strings_cost_linear_time() -> None:
    stops = ["a" * (1000 + i) + "b" for i in range(16)]
    matcher = StopStringMatcher(StopStrings(stops))
    start = time.monotonic()
    shown = sum(len(matcher.push("a" * 4)) for _ in range(2_000))
    assert shown == 8_000 - 1015
    assert time.monotonic() - start < 5.0
