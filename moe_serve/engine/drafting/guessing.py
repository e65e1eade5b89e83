"""Decides in which steps a network guesses tokens, from what its guesses cost and gain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.engine.drafting.draft import DraftSource

Seconds = Callable[[int], float]  # the time of a decode step with so many rows
_LEAST_GAIN = 1.01  # the least gain in speed at which guessing goes on
_LEAST_ROUNDS = 8  # rounds of a batch size before its averages count
_LEAST_WEIGHT = 1 / 32  # of a new measurement
_COLD = 2.0  # a step grows by so many times the time of its guesses: its caches are cold
_MOST_SLOWER = 4.0  # a measured time counts as at most this times the average
_FIRST_REST, _LAST_REST = 32, 1024  # steps without guesses before the next trial
_TRIED = 4  # steps of a trial
_TRY_SHARE = 0.01  # share of the time for trials; slow guesses are tried after longer rests
# Before any measurement: the time of a guess over that of a step, and the share of right guesses.
_COST_MODEL = {
    DraftSource.HEAD: (0.15, 0.6),
    DraftSource.MTP: (0.25, 0.7),
    DraftSource.SELF: (0.8, 0.8),
}


@dataclass(slots=True)
class _Size:
    """The averages for batches of about one size. A round is the guesses of a step; `tokens` and
    `rows_time` are those of the step that verifies them, over those of a step without drafts."""

    num_rounds: int = 0
    tokens: float = 1.0
    rows_time: float = 1.0
    seconds: float = 0.0
    num_timed: int = 0
    rest: int = _FIRST_REST  # steps without guesses before a trial
    num_rested: int = 0
    num_tried: int = 0  # steps of the present trial


class Guessing:
    """Asks a network for guesses while the tokens that they add are worth their time.

    With the averages of the last rounds, guessing pays if

        tokens of a step  >  time of its rows + 2 x time of guessing        over one without drafts

    A drafter that looks up drafts costs next to nothing when it finds nothing, but a network costs
    time in every step that asks it. So if guessing does not pay, no step asks, except for a trial
    of four steps in a row after 32, 64, ... 1024 steps, or after more steps if guesses are slow.
    The averages are kept by the size of the batch, in powers of two.
    """

    def __init__(self, source: DraftSource, most: int, *, is_adaptive: bool = True) -> None:
        """`most` is the number of tokens to guess for a sequence. Unless `is_adaptive`, each step
        asks.
        """
        self.source, self._most, self._is_adaptive = source, most, is_adaptive
        self._sizes: dict[int, _Size] = {}

    def ask(self, num_sequences: int, seconds: Seconds) -> int:
        """Returns the number of tokens to guess for each sequence after the step that begins."""
        if not num_sequences:
            return 0
        size = self._size(num_sequences)
        if not self._is_adaptive or self._pays(size, num_sequences, seconds):
            size.rest, size.num_rested, size.num_tried = _FIRST_REST, 0, 0
            return self._most
        is_due = size.num_rested >= self._rest(size, num_sequences, seconds)
        return self._most if is_due else 0

    def rested(self, num_sequences: int, num_steps: int = 1) -> None:
        """Counts steps that asked for nothing."""
        if num_sequences:
            size = self._size(num_sequences)
            size.num_rested, size.num_tried = size.num_rested + num_steps, 0

    def pause(self, num_sequences: int, seconds: Seconds) -> int:
        """Returns for how many further steps `ask` would return 0."""
        size = self._size(num_sequences)
        return max(0, self._rest(size, num_sequences, seconds) - size.num_rested - 1)

    def is_due(self, num_sequences: int, seconds: Seconds) -> bool:
        """Returns True if the next step would ask."""
        size = self._size(num_sequences)
        is_rested = size.num_rested >= self._rest(size, num_sequences, seconds)
        return is_rested or self._pays(size, num_sequences, seconds)

    def note_time(self, num_sequences: int, seconds: float) -> None:
        """Learns the time of a round of guesses."""
        size = self._size(num_sequences)
        size.num_tried += 1
        if size.num_tried >= _TRIED and size.num_rested >= size.rest:
            size.num_tried = size.num_rested = 0
            size.rest = min(2 * size.rest, _LAST_REST)
        if size.num_timed > 1:  # the first one loads code and weights
            seconds = min(seconds, _MOST_SLOWER * size.seconds)
            seconds = size.seconds + _weight(size.num_timed) * (seconds - size.seconds)
        size.seconds, size.num_timed = seconds, size.num_timed + 1

    def note_round(self, num_sequences: int, tokens: float, rows_time: float) -> None:
        """Learns the gain and the cost of a round: the expected tokens of a sequence in the step
        that verifies it, and the time of that step, both over those without guesses."""
        size = self._size(num_sequences)
        weight = _weight(size.num_rounds)
        size.tokens += weight * (tokens - size.tokens)
        size.rows_time += weight * (rows_time - size.rows_time)
        size.num_rounds += 1

    def _rest(self, size: _Size, num_sequences: int, seconds: Seconds) -> int:
        """Returns the number of steps without guesses before the next trial."""
        cost, _ = _COST_MODEL[self.source]
        measured = _COLD * size.seconds / seconds(num_sequences)
        rounds = measured if size.num_timed else self._most * cost
        return max(size.rest, int(_TRIED * rounds / _TRY_SHARE))

    def _pays(self, size: _Size, num_sequences: int, seconds: Seconds) -> bool:
        if size.num_rounds < _LEAST_ROUNDS:
            return self._promises(num_sequences, seconds)
        time = size.rows_time + _COLD * size.seconds / seconds(num_sequences)
        return size.tokens > _LEAST_GAIN * time

    def _promises(self, num_sequences: int, seconds: Seconds) -> bool:
        """Returns True if guessing pays by the cost model, with the best number of tokens."""
        cost, rate = _COST_MODEL[self.source]
        tokens, survival, step_s = 1.0, 1.0, seconds(num_sequences)
        for count in range(1, self._most + 1):
            survival *= rate
            tokens += survival
            time = seconds(num_sequences * (1 + count)) / step_s + count * cost
            if tokens > _LEAST_GAIN * time:
                return True
        return False

    def _size(self, num_sequences: int) -> _Size:
        key = num_sequences.bit_length()
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = _Size()
        return size


def _weight(num_measured: int) -> float:
    return max(1 / (1 + num_measured), _LEAST_WEIGHT)
