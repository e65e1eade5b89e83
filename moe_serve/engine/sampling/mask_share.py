"""Keeps the time that grammars take within a share of the time that everything else takes.

Masks are computed one after the other in the thread that samples, so a step waits for all of them.
Each step earns as much time for masks as it took without them, and each mask is paid from that. A
sequence whose mask is dear and not affordable is left out of a step: it loses time and no token,
and its neighbours' steps take at most twice as long. This decides only when a sequence runs, never
which tokens it gets.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.answer_masks import MaskCost

_BURST_S = 0.1  # the most that is saved up
_CHEAP_S = 0.0002  # a mask up to this is paid, and never left out
_UNKNOWN_S = 0.001  # expected of a grammar that is new
_HELD_DECAY = 0.75  # of the time that a sequence was left out, when it runs again
_MAX_GRAMMARS = 256  # whose costs are remembered


class MaskShare:
    """Of one scheduler. Told each step's costs by `charge`, asked for the next by `affordable`.

    `max_held_s`: see `SchedulerConfig`."""

    def __init__(self, max_held_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._max_held_s, self._clock = max_held_s, clock
        self._balance_s = _BURST_S
        self._earned_at = self._asked_at = clock()
        self._expected: dict[int, float] = {}  # sequence id -> seconds of its next mask
        self._by_grammar: OrderedDict[Constraint, float] = OrderedDict()  # the same of new ones
        self._held: dict[int, float] = {}  # sequence id -> seconds that it was left out lately
        self.num_held = 0  # sequences that the last step left out

    def charge(self, costs: Mapping[int, MaskCost], sequences: Iterable[Sequence]) -> None:
        """A step has ended: `costs` by sequence id, of `sequences` that were in it."""
        masks_s = sum(cost.wall_s for cost in costs.values())
        self._earn(masks_s)
        self._balance_s -= masks_s
        for sequence in sequences:
            constraint, cost = sequence.request.params.constraint, costs.get(sequence.id)
            if constraint is None or cost is None or not sequence.num_output_tokens:
                continue  # the first one may have compiled the grammar
            self._expected[sequence.id] = max(cost.cpu_s, self._expected.get(sequence.id, 0.0) / 2)
            known_s = self._by_grammar.pop(constraint, 0.0)
            self._by_grammar[constraint] = max(cost.cpu_s, known_s / 2)
            if len(self._by_grammar) > _MAX_GRAMMARS:
                self._by_grammar.popitem(last=False)

    def can_afford(self, decoding: list[Sequence]) -> bool:
        """Whether none of them would be left out."""
        costs = [self._cost(s) for s in decoding if s.request.params.constraint is not None]
        return sum(cost for cost in costs if cost > _CHEAP_S) <= max(0.0, self._balance_s)

    def affordable(self, decoding: list[Sequence], *, is_alone: bool) -> list[Sequence]:
        """Those that the next step computes, in their order. `is_alone`: it computes nothing else,
        so at least one of them runs."""
        self._earn()
        passed_s, self._asked_at = self._earned_at - self._asked_at, self._earned_at
        costs = {s.id: self._cost(s) for s in decoding if s.request.params.constraint is not None}
        dear = [s for s in decoding if costs.get(s.id, 0.0) > _CHEAP_S]
        must_run = is_alone and len(dear) == len(decoding)
        dear.sort(key=lambda s: -self._held.get(s.id, 0.0))  # who waited longest goes first
        left_s, out = self._balance_s, set[int]()
        for sequence in dear:
            held_s = self._held.get(sequence.id, 0.0)
            if left_s > 0.0 or must_run:
                self._held[sequence.id] = held_s * _HELD_DECAY
                left_s -= costs[sequence.id]
            else:
                self._held[sequence.id] = held_s + passed_s
                out.add(sequence.id)
            must_run = False
        self.num_held = len(out)
        return [s for s in decoding if s.id not in out]

    def overdue(self, running: Collection[Sequence], num_waiting: int) -> list[Sequence]:
        """At most `num_waiting` sequences that keep seats from others and hardly run: those that
        were left out longest."""
        late = [s for s in running if self._held.get(s.id, 0.0) > self._max_held_s]
        late.sort(key=lambda s: -self._held[s.id])
        return late[:num_waiting]

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """They have ended, or wait again."""
        for sequence in sequences:
            self._expected.pop(sequence.id, None)
            self._held.pop(sequence.id, None)

    def _earn(self, masks_s: float = 0.0) -> None:
        """Time has passed, `masks_s` of it for masks."""
        now = self._clock()
        passed_s, self._earned_at = now - self._earned_at, now
        self._balance_s = min(_BURST_S, self._balance_s + max(0.0, passed_s - masks_s))

    def _cost(self, sequence: Sequence) -> float:
        """Expected of its next mask. A constraint that ran before is known by what it cost."""
        expected_s = self._expected.get(sequence.id)
        if expected_s is not None and sequence.num_output_tokens > 2:
            return expected_s
        constraint = sequence.request.params.constraint
        assert constraint is not None, f"sequence {sequence.id} follows no grammar"
        return max(expected_s or 0.0, self._by_grammar.get(constraint, _UNKNOWN_S))
