"""Chooses how many drafted tokens of which sequences a step verifies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from math import log, log1p

Seconds = Callable[[int], float]  # the time of a decode step with so many rows
_LEAST_GAIN = (
    1.03  # least gain in speed; drafts that promise less are not worth the time to make them
)
_MOST_LONGER = 2.0  # time of a step with certain tokens, over one without drafts
_MOST_TRIED = 32  # numbers of tokens whose gain is computed, in a large step


def choose_lengths(
    survivals: Mapping[int, List[float]], num_rows: int, most: int, seconds: Seconds
) -> dict[int, int]:
    """Returns the number of drafted tokens to verify by sequence; sequences with none are absent.

    survivals: by sequence id, the probability that each drafted token and all before it are
    accepted; never increasing.
    num_rows: rows of the step without drafts, each of which makes one token.
    most: drafted tokens that fit the step.

    A sequence gets 1 + S tokens from a step, with S the sum of its survivals, and a step with m
    drafted tokens takes seconds(num_rows + m). The choice maximises the geometric mean of the
    sequences' tokens per second,

        sum of log(1 + S) over the sequences  -  num_rows log seconds(num_rows + m)

    With equal drafts that is the throughput. But a request that is easy to predict may not slow
    all others for tokens that end it early: the step would then have fewer rows for a while, and
    the others would take as many steps as before.

    A further token of a sequence adds less to its logarithm than the one before. So the m best
    tokens of all sequences are the first ones of each draft. The best m is searched over all m
    (over each second m from 64 on, and so forth), as in a Mixture-of-Experts model the first
    drafted token costs most (it activates most new experts), so that a search that stops at the
    first loss ends at 0.
    """
    gains = {key: _gains(chain) for key, chain in survivals.items()}
    if len(gains) == 1:
        slots = [*gains.values()][0][:most]
    else:
        slots = sorted((gain for chain in gains.values() for gain in chain), reverse=True)[:most]
    step_s, least = seconds(num_rows), num_rows * log(_LEAST_GAIN)
    if sum(slots) <= least + num_rows * log(seconds(num_rows + 1) / step_s):
        return {}  # not even all tokens in the time of the shortest draft
    best, best_gain = 0, least
    total, stride = 0.0, max(1, len(slots) // _MOST_TRIED)
    for count, gain in enumerate(slots, 1):
        total += gain
        if stride > 1 and count % stride and count != len(slots):
            continue
        net = total - num_rows * log(seconds(num_rows + count) / step_s)
        if net > best_gain:
            best, best_gain = count, net
    if not best:
        return {}
    return _shares(gains, slots[best - 1], best)


def with_certain(
    lengths: Mapping[int, int],
    certain: Mapping[int, int],
    num_rows: int,
    most: int,
    seconds: Seconds,
) -> dict[int, int]:
    """Returns the lengths, extended for drafts whose tokens are certain up to those in `certain`.

    Such a token needs a row in this step or in a later one, so its row is no additional work, and
    saves a step. It is left for later only if the step would make fewer tokens per second, or
    would take more than twice its time while other sequences wait for it.
    """
    found, step_s = dict(lengths), seconds(num_rows)
    rows = num_rows + sum(lengths.values())
    for key, length in certain.items():
        more = min(length - found.get(key, 0), num_rows + most - rows)
        if more <= 0:
            continue
        longer_s = seconds(rows + more)
        if longer_s <= _MOST_LONGER * step_s and longer_s / seconds(rows) < 1 + more / rows:
            found[key], rows = found.get(key, 0) + more, rows + more
    return found


def _gains(survivals: List[float]) -> list[float]:
    """Returns what each token of a draft adds to the logarithm of the sequence's tokens."""
    gains, tokens = list[float](), 1.0
    for survival in survivals:
        gains.append(log1p(survival / tokens))
        tokens += survival
    return gains


def _shares(gains: Mapping[int, List[float]], least: float, num: int) -> dict[int, int]:
    """Returns the number of tokens of each draft among the `num` best ones, of which the last gains
    `least`."""
    if len(gains) == 1:
        return dict.fromkeys(gains, num)
    lengths = {key: sum([each > least for each in chain]) for key, chain in gains.items()}
    num_left = num - sum(lengths.values())
    for key, chain in gains.items():
        if not num_left:
            break
        equal = min(chain.count(least), num_left)
        lengths[key] += equal
        num_left -= equal
    return {key: length for key, length in lengths.items() if length}
