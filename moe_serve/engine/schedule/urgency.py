"""Decides which sequence goes first, and which one gives its pages back.

The lowest `priority` is the most urgent. Each `step_s` of waiting counts as one of priority, so an
endless flow of urgent requests starves no request:

    line          a 0   b 2   c 0   d 2      (b has waited for two steps)
    groups        [a b c]  [d]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items

from moe_serve.engine.request.sequence import Sequence


class Urgency:
    """The scheduler's only rule of order. A rule is a function of the sequences and the time."""

    def __init__(self, step_s: float) -> None:
        """With `step_s` 0, waiting counts for more than any priority: sequences start in order of
        arrival."""
        self._step_s = step_s
        self.is_strict = True  # less urgent ones start only when no more urgent one waits

    def joined(self, sequence: Sequence) -> None:
        """Notes a sequence that begins to wait."""

    def left(self, sequence: Sequence) -> None:
        """Notes a sequence that waits no longer."""

    def key(self, sequence: Sequence, now: float) -> int:
        """Returns the urgency of a waiting sequence; the lowest starts first."""
        num_steps = int((now - sequence.waits_since) / self._step_s) if self._step_s else 0
        return self.level(sequence) - num_steps

    def level(self, sequence: Sequence) -> int:
        """Returns the part of the urgency that does not change while the sequence is here."""
        return sequence.request.priority

    def groups(
        self, line: Items[Sequence], levels: Collection[int], now: float
    ) -> Iterator[Items[Sequence]]:
        """Yields groups of equally urgent waiting sequences, the most urgent first, each in the
        order of `line`.

        `levels` are the different levels in the line. With one level, or if `step_s` is 0, the only
        group is the line itself.
        """
        if len(levels) < 2 or self._step_s == 0:
            yield line
            return
        groups: dict[int, list[Sequence]] = {}
        for sequence in line:
            groups.setdefault(self.key(sequence, now), []).append(sequence)
        for key in sorted(groups):
            yield groups[key]

    def groups_before(self, until: float) -> Iterator[Items[Sequence]]:
        """Yields the groups whose keys are below `until`, in orders by deadlines. This rule has no
        such groups."""
        return iter(())

    def in_step(self, running: Items[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Returns the running sequences in the order in which a step serves them: those that
        decode, then those that still read their prompts. `running` is in the order in which they
        started, which was that of urgency, and both parts keep it."""
        decoding, reading = list[Sequence](), list[Sequence]()
        for sequence in running:
            num_pending = len(sequence.token_ids) - sequence.num_computed_tokens
            if num_pending == 1:
                decoding.append(sequence)
            elif num_pending > 1:
                reading.append(sequence)
        return decoding, reading

    def victim(self, running: Items[Sequence]) -> Sequence:
        """Returns the running sequence that gives its pages back: the least urgent one; among
        several, the one that started last."""
        return max(reversed(running), key=self.level)
