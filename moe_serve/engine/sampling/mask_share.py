"""Limits the time that grammars take to a share of the time that everything else takes.

Masks are computed one after the other in the sampling thread, so a step waits for all of them. Each
step earns as much time for masks as it took without them, and each mask is paid from that. A
sequence whose mask is costly and not affordable is left out of a step: it loses time but no token,
and its neighbours' steps take at most twice as long. This decides only when a sequence runs, never
which tokens it gets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from moe_serve.clock import Clock
from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.answer_masks import MaskCost

_BURST_S = 0.1  # largest balance, unless steps without their masks take longer
_CHEAP_S = 0.0002  # masks up to this cost are never left out
_UNKNOWN_S = 0.001  # expected cost of a new grammar
_HELD_DECAY = 0.75  # factor on a sequence's held time and steps when it runs again
_MIN_HELD_STEPS = 4.0  # left out of fewer steps, a sequence is not overdue, however long they took
_MAX_GRAMMARS = 256  # grammars whose costs are remembered


@dataclass(frozen=True, slots=True)
class _Held:
    """The recent time and steps in which a sequence was left out."""

    seconds: float = 0.0
    steps: float = 0.0

    def longer(self, seconds: float) -> _Held:
        return _Held(self.seconds + seconds, self.steps + 1)

    def decayed(self) -> _Held:
        return _Held(self.seconds * _HELD_DECAY, self.steps * _HELD_DECAY)


_NEVER = _Held()


class MaskShare:
    """The mask budget of one scheduler: `charge` records a step's costs, `affordable` plans the
    next step.

    `max_held_s`: see `SchedulerConfig`.
    """

    def __init__(self, max_held_s: float, clock: Clock) -> None:
        self._max_held_s, self._clock = max_held_s, clock
        self._balance_s = _BURST_S
        self._step_s = self._last_step_s = 0.0  # the last two steps with masks, without the masks
        self._earned_at = self._asked_at = clock()
        self._expected: dict[int, float] = {}  # sequence id -> seconds of its next mask
        self._by_grammar: OrderedDict[Constraint, float] = OrderedDict()  # for new sequences
        self._held: dict[int, _Held] = {}  # by sequence id
        self.num_held = 0  # sequences that the last step left out

    def charge(self, costs: Mapping[int, MaskCost], sequences: Iterable[Sequence]) -> None:
        """Records a finished step: `costs` by sequence id, of `sequences` that were in it."""
        if not costs:
            return
        masks_s = sum(cost.wall_s for cost in costs.values())
        taken_s = max(0.0, self._clock() - self._asked_at - masks_s)
        self._last_step_s, self._step_s = self._step_s, taken_s
        self._earn(masks_s)
        for sequence in sequences:
            constraint, cost = sequence.rules.constraint, costs.get(sequence.id)
            if constraint is None or cost is None or not sequence.num_output_tokens:
                continue  # the first mask may include compiling the grammar
            self._expected[sequence.id] = max(cost.cpu_s, self._expected.get(sequence.id, 0.0) / 2)
            known_s = self._by_grammar.pop(constraint, 0.0)
            self._by_grammar[constraint] = max(cost.cpu_s, known_s / 2)
            if len(self._by_grammar) > _MAX_GRAMMARS:
                self._by_grammar.popitem(last=False)

    def can_afford(self, decoding: list[Sequence]) -> bool:
        """Returns whether none of the sequences would be left out."""
        costs = [self._cost(s) for s in decoding if s.rules.constraint is not None]
        return sum(cost for cost in costs if cost > _CHEAP_S) <= max(0.0, self._balance_s)

    def affordable(self, decoding: list[Sequence], *, is_alone: bool) -> list[Sequence]:
        """Returns the sequences that the next step computes, in their order. `is_alone` means that
        the step computes nothing else, so at least one of them runs."""
        self._earn()
        passed_s, self._asked_at = self._earned_at - self._asked_at, self._earned_at
        costs = {s.id: self._cost(s) for s in decoding if s.rules.constraint is not None}
        if not costs:
            self.num_held = 0
            return decoding
        costly = [s for s in decoding if costs.get(s.id, 0.0) > _CHEAP_S]
        must_run = is_alone and len(costly) == len(decoding)
        costly.sort(key=lambda s: -self._held.get(s.id, _NEVER).seconds)  # longest held first
        left_s, out = self._balance_s, set[int]()
        for sequence in costly:
            held = self._held.get(sequence.id, _NEVER)
            if left_s > 0.0 or must_run:
                self._held[sequence.id] = held.decayed()
                left_s -= costs[sequence.id]
            else:
                self._held[sequence.id] = held.longer(passed_s)
                out.add(sequence.id)
            must_run = False
        self.num_held = len(out)
        return [s for s in decoding if s.id not in out]

    def overdue(self, running: Collection[Sequence], num_waiting: int) -> list[Sequence]:
        """Returns at most `num_waiting` sequences that hold seats others need and hardly run: those
        that were left out longest."""
        held = [(self._held.get(s.id, _NEVER), s) for s in running]
        late = [
            (h.seconds, s)
            for h, s in held
            if h.seconds > self._max_held_s and h.steps >= _MIN_HELD_STEPS
        ]
        late.sort(key=lambda pair: -pair[0])
        return [s for _, s in late[:num_waiting]]

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Drops sequences that have ended or wait again."""
        for sequence in sequences:
            self._expected.pop(sequence.id, None)
            self._held.pop(sequence.id, None)

    def _earn(self, masks_s: float = 0.0) -> None:
        """Adds the time since the last call, without the `masks_s` spent on masks, and pays these.

        What is left is cut to the burst, or to the time of a step if the last two took longer: the
        masks of such a step may take more than the burst.
        """
        now = self._clock()
        passed_s, self._earned_at = now - self._earned_at, now
        earned_s = max(0.0, passed_s - masks_s)
        most_s = max(_BURST_S, min(self._step_s, self._last_step_s))
        self._balance_s = min(most_s, self._balance_s + earned_s - masks_s)

    def _cost(self, sequence: Sequence) -> float:
        """Returns the expected cost of the next mask, from the sequence or from its constraint's
        past costs."""
        expected_s = self._expected.get(sequence.id)
        if expected_s is not None and sequence.num_output_tokens > 2:
            return expected_s
        constraint = sequence.rules.constraint
        assert constraint is not None, f"sequence {sequence.id} follows no grammar"
        return max(expected_s or 0.0, self._by_grammar.get(constraint, _UNKNOWN_S))
