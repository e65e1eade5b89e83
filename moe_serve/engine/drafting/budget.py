"""Chooses how many drafted tokens of which sequences a step verifies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List

Seconds = Callable[[int], float]  # the time of a decode step with so many rows


def choose_lengths(
    survivals: Mapping[int, List[float]], num_rows: int, most: int, seconds: Seconds
) -> dict[int, int]:
    """Return the number of drafted tokens to verify by sequence; sequences with none are absent.

    survivals: by sequence id, the probability that each drafted token and all before it are
    accepted; never increasing.
    num_rows: rows of the step without drafts, each of which makes one token.
    most: drafted tokens that fit the step.

    A step with m drafted tokens makes num_rows + sum(survival) tokens in seconds(num_rows + m). The
    m most probable tokens of all sequences are the best m, and as survivals fall within a draft,
    these are the first ones of each draft. The best m is where tokens per second are highest. It is
    searched over all m, as in a Mixture-of-Experts model the first drafted token costs most
    (it activates most new experts), so that a search that stops at the first loss ends at 0.
    """
    slots = sorted(
        ((survival, key) for key, each in survivals.items() for survival in each), reverse=True
    )[:most]
    best, best_rate = 0, num_rows / seconds(num_rows)
    tokens = float(num_rows)
    for count, (survival, _) in enumerate(slots, 1):
        tokens += survival
        rate = tokens / seconds(num_rows + count)
        if rate > best_rate:
            best, best_rate = count, rate
    lengths: dict[int, int] = {}
    for _, key in slots[:best]:
        lengths[key] = lengths.get(key, 0) + 1
    return lengths
