"""Links: bandwidth that transfers share, and parcels that wait for steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.cluster.parcels.parcel import Lease, Parcel, RankPlace
from moe_serve.simulate.coordinated.instant_carrier import InstantCarrier, PageLinks
from moe_serve.simulate.coordinated.shared_links import SharedLinks
from moe_serve.simulate.virtual_clock import VirtualClock


def test_transfers_share_an_end_and_speed_up_when_one_has_ended() -> None:
    """100 and 300 bytes leave one end of 100 bytes/s: at 50 each until 2 s, then 200 at 100."""
    links = SharedLinks()
    for end in "abc":
        links.set_bandwidth(end, 100.0)
    links.put(1, "a", "b", 100, 0.0)
    links.put(2, "a", "c", 300, 0.0)
    assert links.next_end() == (2.0, 1)
    links.take(1, 2.0)
    assert links.next_end() == (pytest.approx(4.0), 2)


def test_shares_are_fair_between_slow_and_fast_ends() -> None:
    """The slow end gets what it takes, 10; the other transfer from the same source the rest, 90."""
    links = SharedLinks()
    for end, rate in (("a", 100.0), ("slow", 10.0), ("fast", 1000.0)):
        links.set_bandwidth(end, rate)
    links.put(1, "a", "slow", 100, 0.0)
    links.put(2, "a", "fast", 900, 0.0)
    assert links.next_end() == (pytest.approx(10.0), 1)
    links.take(1, 10.0)
    assert links.next_end() == (pytest.approx(10.0), 2)


@dataclass
class _Alone:
    ends: tuple[str, str]
    left: float
    rate: float = 0.0


class OneByOne:
    """The same links without bundles: every transfer has its own bytes, and all rates are computed
    again at every change."""

    def __init__(self, bandwidths: dict[str, float]) -> None:
        self.bandwidths, self.at_s = bandwidths, 0.0
        self.transfers: dict[int, _Alone] = {}

    def change(self, at_s: float, number: int, transfer: _Alone | None) -> None:
        for each in self.transfers.values():
            each.left = max(0.0, each.left - (at_s - self.at_s) * each.rate)
        self.at_s = at_s
        if transfer is None:
            del self.transfers[number]
        else:
            self.transfers[number] = transfer
        waiting = list(self.transfers.values())
        ways = [[(True, x.ends[0]), (False, x.ends[1])] for x in waiting]
        free = {way: self.bandwidths[way[1]] for both in ways for way in both}
        while waiting:
            counts = Counter(way for both in ways for way in both)
            shares = {way: free[way] / count for way, count in counts.items()}
            scarcest = min(shares, key=shares.__getitem__)
            for each, both in zip(waiting, ways, strict=True):
                if scarcest in both:
                    each.rate = shares[scarcest]
                    free |= {way: max(0.0, free[way] - each.rate) for way in both}
            left = [i for i, both in enumerate(ways) if scarcest not in both]
            waiting, ways = [waiting[i] for i in left], [ways[i] for i in left]

    def next_end(self) -> tuple[float, int] | None:
        ends = [(x.left / x.rate, number) for number, x in self.transfers.items()]
        return (self.at_s + min(ends)[0], min(ends)[1]) if ends else None


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from("xy"),
            st.integers(1, 12),  # transfers that begin together
            st.sampled_from([7.0, 30.0]),
            st.sampled_from([0.0, 0.0, 0.05, 0.3, 2.0]),  # seconds since the last
        ),
        max_size=12,
    )
)
def test_transfers_that_begin_together_end_as_one_by_one(
    begun: list[tuple[str, str, int, float, float]],
) -> None:
    """All ends are equal, to the last bit."""
    bandwidths = {"a": 100.0, "b": 30.0, "c": 70.0, "x": 90.0, "y": 110.0}
    fast, slow = SharedLinks(), OneByOne(bandwidths)
    for end, rate in bandwidths.items():
        fast.set_bandwidth(end, rate)
    number, now = 0, 0.0

    def end_until(at_s: float) -> None:
        while (found := slow.next_end()) is not None and found[0] <= at_s:
            assert fast.next_end() == found
            fast.take(found[1], found[0])
            slow.change(found[0], found[1], None)

    for source, target, count, num_bytes, gap_s in begun:
        now += gap_s
        end_until(now)
        for _ in range(count):
            number += 1
            fast.put(number, source, target, num_bytes, now)
            slow.change(now, number, _Alone((source, target), num_bytes))
        assert fast.next_end() == slow.next_end()
    end_until(float("inf"))
    assert fast.next_end() is None


SOURCE, TARGET = RankPlace(0, "attention-0", 1), RankPlace(1, "attention-0", 1)


def parcel(number: int, pages: int = 10) -> Parcel:
    places = tuple(range(pages))
    return Parcel(lease=Lease(number, number), number=0, source=SOURCE, target=TARGET,
                  source_pages=places, target_pages=places)  # fmt: skip


def run_out(carrier: InstantCarrier, clock: VirtualClock) -> list[float]:
    """Lets everything happen, and returns when."""
    seen = []
    while (next_s := carrier.next_s) is not None:
        seen.append(next_s)
        clock.advance_to(next_s)
        carrier.advance_to(next_s)
    return seen


def test_a_parcel_waits_for_the_steps_of_both_ranks() -> None:
    """It leaves at 1 s, when the source's step ends, travels 1 s and 0.5 s of latency, and the
    target copies it at 4 s, when its step ends."""
    clock, ends = VirtualClock(), {0: 1.0, 1: 4.0}
    links = PageLinks(bytes_per_s=[100.0, 100.0], latency_s=0.5, page_bytes=10, parcel_bytes=100,
                      memory_bytes=200)  # fmt: skip
    carrier = InstantCarrier(links, clock, lambda cell: ends[cell])
    assert (carrier.pages_per_parcel, carrier.num_free(TARGET)) == (10, 20)
    carrier.send(parcel(1))
    assert carrier.num_free(TARGET) == 10
    assert run_out(carrier, clock) == [1.0, 2.0, 2.5, 4.0]
    (ended,) = carrier.take_ended()
    assert ended.is_sound and ended.seconds == 4.0 and not carrier.take_ended()
    assert (carrier.num_free(TARGET), carrier.num_bytes, carrier.num_parcels) == (20, 100, 1)


def test_an_ended_lease_frees_the_link_and_reports_nothing() -> None:
    clock = VirtualClock()
    links = PageLinks(bytes_per_s=[100.0, 100.0], latency_s=0.0, page_bytes=10, parcel_bytes=100,
                      memory_bytes=1000)  # fmt: skip
    carrier = InstantCarrier(links, clock, lambda cell: clock.now)
    carrier.send(parcel(1))
    carrier.send(parcel(2))
    carrier.advance_to(0.0)
    clock.advance_to(1.0)
    carrier.end_lease(Lease(1, 1))
    assert carrier.num_free(TARGET) == 90
    run_out(carrier, clock)
    (ended,) = carrier.take_ended()
    assert ended.parcel.lease.number == 2 and ended.seconds == pytest.approx(1.5)
