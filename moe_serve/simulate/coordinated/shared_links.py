"""Transfers that share the bandwidth of their ends, over simulated time.

A transfer leaves one end and enters another; each end sends up to its bandwidth and receives up to
its bandwidth. Transfers share them max-min fairly: none could have more without taking from one
that has as little or less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

_Way = tuple[bool, Hashable]  # (is it the sending way, end)


@dataclass(slots=True)
class _Transfer:
    ways: tuple[_Way, _Way]
    left: float  # bytes
    rate: float = 0.0


class SharedLinks:
    """The transfers under way, by number. Times must not decrease from call to call."""

    def __init__(self) -> None:
        self._bandwidths: dict[Hashable, float] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._at_s = 0.0

    def set_bandwidth(self, end: Hashable, bytes_per_s: float) -> None:
        """Sets how many bytes per second an end sends, and how many it receives."""
        self._bandwidths[end] = bytes_per_s

    def put(
        self, number: int, source: Hashable, target: Hashable, num_bytes: float, at_s: float
    ) -> None:
        """Starts a transfer between two ends whose bandwidths are set."""
        self._advance(at_s)
        self._transfers[number] = _Transfer(((True, source), (False, target)), num_bytes)
        self._share()

    def take(self, number: int, at_s: float) -> None:
        """Removes a transfer, if it is under way: it has ended, or it is given up."""
        self._advance(at_s)
        if self._transfers.pop(number, None) is not None:
            self._share()

    def next_end(self) -> tuple[float, int] | None:
        """Returns when the next transfer ends if no other begins, and its number; None without a
        transfer.
        """
        found = min(
            ((x.left / x.rate, number) for number, x in self._transfers.items()), default=None
        )
        return None if found is None else (self._at_s + found[0], found[1])

    def _advance(self, at_s: float) -> None:
        gap = max(0.0, at_s - self._at_s)
        for each in self._transfers.values():
            each.left = max(0.0, each.left - gap * each.rate)
        self._at_s = max(self._at_s, at_s)

    def _share(self) -> None:
        """Gives every transfer its rate: fills the way with the scarcest share, then the next."""
        waiting = dict(self._transfers)
        free = {way: self._bandwidths[way[1]] for x in waiting.values() for way in x.ways}
        while waiting:
            counts = Counter(way for each in waiting.values() for way in each.ways)
            shares = {way: free[way] / count for way, count in counts.items()}
            scarcest = min(shares, key=shares.__getitem__)
            for number in [n for n, each in waiting.items() if scarcest in each.ways]:
                each = waiting.pop(number)
                each.rate = shares[scarcest]
                for way in each.ways:
                    free[way] = max(0.0, free[way] - each.rate)
