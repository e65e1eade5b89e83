"""Measures what the steps of the demonstration model cost: by rows, with drafts, with lookups.

The figures are processor times, so that other programs on the machine disturb them less. They are
the input of the part `controller`, which runs the controller in virtual time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from moe_serve.engine.drafting.draft import Draft
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.drafting.oracle import Oracle
from moe_serve.engine.request.sequence import Schedule
from moe_serve.text.tokenizer import Tokenizer

from .turns import Bench
from .workloads import natural

BATCHES = (1, 2, 4, 8, 16, 32, 64)
DRAFTED = (1, 2, 3, 5, 8, 16)  # tokens of each sequence
_TOKENS = 64


@dataclass(slots=True)
class _Watch:
    """The processor times of decode steps, apart by a number that tells their kind."""

    kind: int = 0
    times: dict[int, list[float]] = field(default_factory=dict)

    def typical(self, kind: int) -> float:
        """Returns the lower quartile, in microseconds."""
        return 1e6 * statistics.quantiles(self.times[kind], n=4)[0]


class _Asking(Drafting):
    """Looks for drafts of all sequences in each second step, or of one, and verifies none."""

    def __init__(self, real: Drafting, watch: _Watch) -> None:
        self.__dict__.update(real.__dict__)
        self._watch, self._number = watch, 0

    def choose(self, schedule: Schedule, most: int) -> dict[int, Draft]:
        self._number += 1
        kind = self._watch.kind = self._number % 3
        asked = [*schedule][: (0, 1, len(schedule))[kind]]
        for key in asked:
            self._propose(schedule[key][0], searches=True)
        return {}


class _Few(Drafting):
    """Drafts for the first `most` sequences only."""

    def __init__(self, real: Drafting, most: int) -> None:
        self.__dict__.update(real.__dict__)
        self._most_sequences = most

    def choose(self, schedule: Schedule, most: int) -> dict[int, Draft]:
        few = dict([*schedule.items()][: self._most_sequences])
        return super().choose(few, most)


def step_costs(bench: Bench, rounds: int) -> Iterator[str]:
    """Yields lines of figures, in microseconds: a plain step, the time that a step with so many
    drafted tokens of each sequence takes more (with a minus: of one sequence), and the time that a
    step takes more if one sequence or all look in vain."""
    text = Tokenizer.load(bench.built.layout.folder)
    for batch in BATCHES:
        asked = natural(text, batch, _TOKENS, 0.0)
        answers = bench.turn(asked, None).answers
        watch = _Watch()
        for _ in range(rounds):
            _run(bench, batch, None, watch, 0)
            for count in DRAFTED:
                _run(bench, batch, _oracle(bench, answers, count), watch, count)
                if batch > 1:
                    few = _Few(_oracle(bench, answers, count), 1)
                    _run(bench, batch, few, watch, -count)
        found = {kind: watch.typical(kind) for kind in watch.times}
        plain = found.pop(0)
        looks = _lookups(bench, batch, rounds)
        more = ", ".join(f"{kind}: {us - plain:.0f}" for kind, us in sorted(found.items()))
        lookups = f"one lookup {looks[0]:.0f}, all {looks[1]:.0f}"
        yield f"batch {batch:2}: plain {plain:.0f}; more {more}; {lookups}"


def _oracle(bench: Bench, answers: Mapping[str, list[int]], most: int) -> Drafting:
    size, stop = bench.built.layout.vocab_size, bench.engine.stop_rule
    oracle = Oracle(answers, 1.0, vocab_size=size)
    return Drafting([oracle], stop, vocab_size=size, max_tokens=most, is_adaptive=False)


def _lookups(bench: Bench, batch: int, rounds: int) -> tuple[float, float]:
    watch = _Watch()
    for _ in range(rounds):
        real = bench.drafting(method="auto")
        assert real is not None, "the method is not off"
        _run(bench, batch, _Asking(real, watch), watch, None)
    none, one, every = (watch.typical(kind) for kind in range(3))
    return one - none, every - none


def _run(
    bench: Bench, batch: int, drafting: Drafting | None, watch: _Watch, kind: int | None
) -> None:
    text = Tokenizer.load(bench.built.layout.folder)
    temperature = 0.0 if kind is not None else 1.0
    engine = bench.engine
    engine.drafts.use(drafting, bench.clock)
    bench._executor.drafter = None
    for request in natural(text, batch, _TOKENS, temperature):
        engine.add(request)
    while engine.has_work:
        begun = time.thread_time()
        deltas = engine.step()
        seconds = time.thread_time() - begun
        if len(deltas) != batch or any(d.finish_reason or not d.token_ids for d in deltas):
            continue
        wanted = watch.kind if kind is None else kind
        sizes = sorted(len(d.token_ids) for d in deltas)
        if kind is not None and (
            sizes[-1] != 1 + abs(kind) or (kind >= 0 and sizes[0] != sizes[-1])
        ):
            continue
        watch.times.setdefault(wanted, []).append(seconds)
