"""Chooses how many drafted tokens of which sequences a step verifies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List

Seconds = Callable[[int], float]  # the time of a decode step with so many rows
_LEAST_GAIN = 1.03  # in tokens per second; drafts that promise less also cost time to make
_MOST_TRIED = 32  # numbers of tokens whose gain is computed, in a large step


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
    searched over all m (over each second m from 64 on, and so forth), as in a Mixture-of-Experts
    model the first drafted token costs most (it activates most new experts), so that a search that
    stops at the first loss ends at 0.
    """
    if len(survivals) == 1:
        slots = [*survivals.values()][0][:most]
    else:
        slots = sorted((s for chain in survivals.values() for s in chain), reverse=True)[:most]
    best, best_rate = 0, _LEAST_GAIN * num_rows / seconds(num_rows)
    if num_rows + sum(slots) <= best_rate * seconds(num_rows + 1):
        return {}  # not even all tokens in the time of the shortest draft
    tokens, stride = float(num_rows), max(1, len(slots) // _MOST_TRIED)
    for count, survival in enumerate(slots, 1):
        tokens += survival
        if stride > 1 and count % stride and count != len(slots):
            continue
        rate = tokens / seconds(num_rows + count)
        if rate > best_rate:
            best, best_rate = count, rate
    if not best:
        return {}
    return _shares(survivals, slots[best - 1], best)


def _shares(survivals: Mapping[int, List[float]], least: float, num: int) -> dict[int, int]:
    """Return the number of tokens of each draft among the `num` most probable ones, of which the
    last has the probability `least`."""
    if len(survivals) == 1:
        return dict.fromkeys(survivals, num)
    lengths = {key: sum([each > least for each in chain]) for key, chain in survivals.items()}
    num_left = num - sum(lengths.values())
    for key, chain in survivals.items():
        if not num_left:
            break
        equal = min(chain.count(least), num_left)
        lengths[key] += equal
        num_left -= equal
    return {key: length for key, length in lengths.items() if length}
