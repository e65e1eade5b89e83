"""Transfers that share the bandwidth of their ends, over simulated time.

A transfer leaves one end and enters another; each end sends up to its bandwidth and receives up to
its bandwidth. Transfers share them max-min fairly: none could have more without taking from one
that has as little or less.

Pages of a prompt leave together, in many transfers of equal size. Such transfers are a *bundle*:
they have the same rate and the same bytes left as long as they last, so these are computed once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

_Ways = tuple[int, int]  # the way out of one end and into another; end n has 2 n and 2 n + 1


@dataclass(slots=True, eq=False)
class _Bundle:
    """Transfers between the same ends that began at the same time with the same size. `members`:
    their numbers, and how many transfers had begun before each."""

    ways: _Ways
    left: float  # bytes of each
    members: dict[int, int] = field(default_factory=dict)
    rate: float = 0.0  # of each

    @property
    def begun_first(self) -> int:
        return next(iter(self.members.values()))


class SharedLinks:
    """The transfers under way, by number. Times must not decrease from call to call."""

    def __init__(self) -> None:
        self._ends: dict[Hashable, int] = {}
        self._bandwidths: list[float] = []  # by way
        self._bundles: list[_Bundle] = []
        self._fresh: dict[tuple[_Ways, float], _Bundle] = {}  # that began at `_at_s`
        self._by_number: dict[int, _Bundle] = {}
        self._num_begun = 0
        self._at_s = 0.0
        self._is_shared = True  # all rates are those of the transfers under way
        self._next_end: tuple[float, int] | None = None  # only while it is known
        self._knows_end = False

    def set_bandwidth(self, end: Hashable, bytes_per_s: float) -> None:
        """Sets how many bytes per second an end sends, and how many it receives."""
        number = self._ends.setdefault(end, len(self._ends))
        self._bandwidths[2 * number : 2 * number + 2] = bytes_per_s, bytes_per_s

    def put(
        self, number: int, source: Hashable, target: Hashable, num_bytes: float, at_s: float
    ) -> None:
        """Starts a transfer between two ends whose bandwidths are set."""
        self._advance(at_s)
        key = (2 * self._ends[source], 2 * self._ends[target] + 1), num_bytes
        bundle = self._fresh.get(key)
        if bundle is None:
            bundle = self._fresh[key] = _Bundle(*key)
            self._bundles.append(bundle)
        bundle.members[number] = self._num_begun
        self._by_number[number] = bundle
        self._num_begun += 1
        self._is_shared = self._knows_end = False

    def take(self, number: int, at_s: float) -> None:
        """Removes a transfer, if it is under way: it has ended, or it is given up."""
        self._advance(at_s)
        bundle = self._by_number.pop(number, None)
        if bundle is None:
            return
        del bundle.members[number]
        if not bundle.members:
            self._bundles.remove(bundle)
            self._fresh = {key: each for key, each in self._fresh.items() if each is not bundle}
        self._is_shared = self._knows_end = False

    def next_end(self) -> tuple[float, int] | None:
        """Returns when the next transfer ends if no other begins, and its number; None without a
        transfer.
        """
        if not self._knows_end:
            least, ending = 0.0, [each for each in self._bundles if not each.left]
            if not ending:  # else they end now, at any rate
                self._share()
                found = [(each.left / each.rate, each) for each in self._bundles]
                least = min([left_s for left_s, _ in found], default=0.0)
                ending = [each for left_s, each in found if left_s == least]
            number = min([min(each.members) for each in ending], default=-1)
            self._next_end = (self._at_s + least, number) if ending else None
            self._knows_end = True
        return self._next_end

    def _advance(self, at_s: float) -> None:
        gap = at_s - self._at_s
        if gap <= 0.0:
            return
        self._share()
        for each in self._bundles:
            each.left = max(0.0, each.left - gap * each.rate)
        self._at_s = at_s
        self._fresh = {}
        self._knows_end = False

    def _share(self) -> None:
        """Gives every transfer its rate: fills the way with the scarcest share, then the next."""
        if self._is_shared:
            return
        self._is_shared = True
        waiting = sorted(self._bundles, key=lambda each: each.begun_first)
        free = {way: self._bandwidths[way] for each in waiting for way in each.ways}
        while waiting:
            counts: dict[int, int] = {}
            for each in waiting:
                for way in each.ways:
                    counts[way] = counts.get(way, 0) + len(each.members)
            shares = {way: free[way] / count for way, count in counts.items()}
            scarcest = min(shares, key=shares.__getitem__)
            rate = shares[scarcest]
            filled = [each for each in waiting if scarcest in each.ways]
            waiting = [each for each in waiting if scarcest not in each.ways]
            needed = {way for each in waiting for way in each.ways}
            for each in filled:
                each.rate = rate
                for way in needed.intersection(each.ways):
                    free[way] = _without(free[way], rate, len(each.members))


def _without(bytes_per_s: float, rate: float, count: int) -> float:
    """Returns what is left of a bandwidth after `count` transfers have taken `rate` each, one by
    one, as a product rounds differently."""
    for _ in range(count):
        bytes_per_s = max(0.0, bytes_per_s - rate)
    return bytes_per_s
