"""Runs the engine with recorded answers in virtual time, so that other programs change nothing.

The engine, its scheduler and the controller are the real ones. Only the model is replaced: its
tokens were recorded, and a step takes the time that a table says. So two runs give the same
figures on every machine.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.drafting.draft import Draft
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_outcome import StepOutcome
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.engine.sampling.sampler import Sampled
from moe_serve.model.step_plan import StepPlan
from moe_serve.simulate.virtual_clock import VirtualClock

# Microseconds of a plain step by batch, and by which drafts make it longer: first with the drafted
# tokens of one sequence (1, 2, 3, 5, 8, 16), then with as many of each. Processor times of the
# demonstration model on one core of an AMD EPYC (Zen 4), which other programs used as well.
_DRAFTED = (0, 1, 2, 3, 5, 8, 16)
_PLAIN = {1: 312, 2: 585, 4: 1386, 8: 2308, 16: 3268, 32: 4634, 64: 7345}
_ONE = {
    1: (0, 326, 574, 786, 1100, 1517, 2142),
    2: (0, 481, 675, 951, 1334, 1549, 2072),
    4: (0, 300, 495, 828, 1055, 1150, 1756),
    8: (0, 278, 386, 576, 775, 862, 1237),
    16: (0, 285, 290, 298, 399, 622, 909),
    32: (0, 200, 238, 290, 438, 574, 1221),
    64: (0, 117, 160, 220, 309, 324, 749),
}
_ALL = {
    1: (0, 326, 574, 786, 1100, 1517, 2142),
    2: (0, 769, 1016, 1336, 1845, 2322, 3358),
    4: (0, 1005, 1455, 1814, 2369, 2953, 5271),
    8: (0, 1272, 1632, 2268, 3154, 4475, 8537),
    16: (0, 1568, 2547, 3398, 5143, 8044, 15986),
    32: (0, 2807, 4637, 6668, 10218, 16709, 33445),
    64: (0, 5396, 9034, 12938, 22305, 35882, 70000),
}
_PROMPT_ROW_S = 100e-6
_SPELL = 40  # steps of a slow or fast spell, on average
_COOLING = (1.0, 0.33, 0.17)  # of `behind` for plain steps in turn, as the caches fill again
_FEW = 8  # steps after which the caches have forgotten how drafts are verified


@dataclass(frozen=True, slots=True)
class Machine:
    """The time of steps, over that of the table."""

    name: str = "as measured"
    plain: float = 1.0
    drafted: float = 1.0  # of what drafts add
    lookup_s: float = 25e-6  # the first lookup of a step
    further_lookup_s: float = 8e-6  # and each further one
    cold: float = 2.0  # time by which the step behind a lookup is longer, over the first lookup's
    noise: float = 0.0  # deviation of the logarithm of a step's time
    pauses: float = 0.0  # share of the steps that take four times their time
    slower: float = 1.0  # steps take so many times their time half of the time, in long spells
    first_draft_s: float = 0.0  # a step with drafts takes longer if those before it had none
    behind: float = 1.0  # time of the plain step behind one with drafts, over that of others
    seed: int = 7  # of the noise

    def step_s(self, lengths: Sequence[int]) -> float:
        """Returns the time of a decode step. `lengths`: the drafted tokens of its sequences."""
        batch, num_drafts = len(lengths), sum(length > 0 for length in lengths)
        us = self.plain * _between(_PLAIN, batch)
        if num_drafts:
            mean = sum(lengths) / num_drafts
            one, every = (
                _between({b: _at(row, mean) for b, row in table.items()}, batch)
                for table in (_ONE, _ALL)
            )
            share = (num_drafts - 1) / max(1, batch - 1)
            us += self.drafted * self.plain * (one + (every - one) * share)
        return 1e-6 * us


def _at(row: Sequence[int], drafted: float) -> float:
    return _between(dict(zip(_DRAFTED, row, strict=True)), drafted)


def _between(table: Mapping[int, float], value: float) -> float:
    keys = [*table]
    right = min(max(1, bisect_right(keys, value)), len(keys) - 1)
    low, high = keys[right - 1], keys[right]
    share = (value - low) / (high - low)
    return table[low] * (1 - share) + table[high] * share


class _LookupCharge:
    """Implements Drafter. It proposes nothing, but moves the clock on for each lookup."""

    searches = True

    def __init__(self, clock: VirtualClock, machine: Machine) -> None:
        self._clock, self._machine = clock, machine
        self.num = 0  # in the running step

    def propose(self, sequence: EngineSequence, most: int) -> Draft | None:
        """See Drafter.propose."""
        machine = self._machine
        seconds = machine.further_lookup_s if self.num else machine.lookup_s
        self._clock.advance_to(self._clock.now + seconds)
        self.num += 1
        return None

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """See Drafter.forget."""


class RecordedExecutor:
    """Implements StepExecutor with answers that are known."""

    def __init__(self, clock: VirtualClock, machine: Machine) -> None:
        self._clock, self._machine = clock, machine
        self._random, self._is_slow = random.Random(machine.seed), False
        self.answers: Mapping[str, Sequence[int]] = {}
        self.charge: _LookupCharge | None = None
        self._num_plain = _FEW  # steps in turn without drafts
        self.surplus_s = 0.0  # time of all steps that noise added

    def run(self, plan: StepPlan, sequences: Mapping[int, EngineSequence]) -> StepOutcome:
        """See `StepExecutor.run`."""
        sampled, lengths, num_prompt_rows = dict[int, tuple[Sampled, ...]](), list[int](), 0
        for piece in plan.slices:
            sequence = sequences[piece.sequence_id]
            num_own = len(piece.token_ids) - piece.num_drafted
            lengths.append(piece.num_drafted)
            num_prompt_rows += num_own - 1
            if not piece.num_logits:
                continue
            answer = self.answers[sequence.request.request_id]
            place = piece.start + num_own - sequence.num_prompt_tokens
            run = [answer[place]]
            for token in piece.drafted:
                if token != run[-1]:
                    break
                run.append(answer[min(place + len(run), len(answer) - 1)])
            sampled[sequence.id] = tuple(Sampled(token, True, None) for token in run)
        seconds = self._machine.step_s(lengths) + num_prompt_rows * _PROMPT_ROW_S
        if not any(lengths) and self._num_plain < len(_COOLING):
            more = (self._machine.behind - 1.0) * _COOLING[self._num_plain]
            seconds += more * self._machine.step_s(lengths)
        if any(lengths):
            seconds += self._machine.first_draft_s if self._num_plain >= _FEW else 0.0
            self._num_plain = 0
        else:
            self._num_plain += 1
        self._pass(seconds)
        return StepOutcome(sampled=sampled)

    def _pass(self, seconds: float) -> None:
        machine = self._machine
        if machine.noise:
            if self._random.random() < 1 / _SPELL:
                self._is_slow = not self._is_slow
            noisy_s = seconds * self._random.lognormvariate(0.0, machine.noise)
            noisy_s *= 4.0 if self._random.random() < machine.pauses else 1.0
            noisy_s *= machine.slower if self._is_slow else 1.0
            self.surplus_s += noisy_s - seconds
            seconds = noisy_s
        if self.charge is not None and self.charge.num:
            seconds += machine.cold * machine.lookup_s
            self.charge.num = 0
        self._clock.advance_to(self._clock.now + seconds)

    @property
    def has_page_work(self) -> bool:
        return False  # there are no pages

    def finish_page_work(self) -> None:
        """Does nothing."""

    @property
    def expert_memory(self) -> None:
        """None, as all experts are in memory."""

    def forget(self, sequence_ids: list[int]) -> None:
        """Does nothing, as no state is kept between steps."""

    def clear_pages(self, pages: list[int]) -> None:
        """Does nothing, as pages have no content."""

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Does nothing, as pages have no content."""

    def finite_pages(self, pages: list[int]) -> list[bool]:
        return [True] * len(pages)


@dataclass(frozen=True, slots=True)
class VirtualTurn:
    """The decode steps of one run, as `Turn` counts them. The controller sees noise, but these
    seconds are without it."""

    seconds: float
    tokens: int
    steps: int
    first_draft: int | None  # the decode step that verified the first draft; None: none did
    num_drafted: int
    num_accepted: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class VirtualBench:
    """The engine on a machine of the table."""

    def __init__(self, machine: Machine, max_num_seqs: int = 64) -> None:
        self.clock, self.machine = VirtualClock(), machine
        self._executor = RecordedExecutor(self.clock, machine)
        self.engine = Engine(
            self._executor,
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
            num_pages=64 * max_num_seqs,
            micro_batches=1,
            max_model_len=1024,
            eos_token_ids=frozenset(),
            clock=self.clock,
        )

    def charged(self, drafting: Drafting) -> Drafting:
        """Returns a drafting whose lookups take their time."""
        charge = _LookupCharge(self.clock, self.machine)
        drafting._search.drafters = (charge, *drafting._search.drafters)
        return drafting

    def turn(
        self,
        requests: Sequence[GenerationRequest],
        answers: Mapping[str, Sequence[int]],
        drafting: Drafting | None,
    ) -> VirtualTurn:
        """Runs the requests to their ends, and checks their answers."""
        engine, found = self.engine, {r.request_id: list[int]() for r in requests}
        engine.drafts.use(drafting, self.clock)
        self._executor.answers = answers
        charges = () if drafting is None else drafting._search.drafters[:1]
        self._executor.charge = next((c for c in charges if isinstance(c, _LookupCharge)), None)
        before = engine.stats().counts.drafts.total
        for request in requests:
            engine.add(request)
        while any(not answer for answer in found.values()):
            for delta in engine.step():
                found[delta.request_id] += delta.token_ids
        surplus_s = self._executor.surplus_s
        begun_at, steps, num_first = self.clock.now, 0, sum(map(len, found.values()))
        first: int | None = None
        while engine.has_work:
            steps += 1
            for delta in engine.step():
                found[delta.request_id] += delta.token_ids
                if delta.drafted is not None and first is None:
                    first = steps
        for request in requests:
            known = answers[request.request_id][: len(found[request.request_id])]
            assert found[request.request_id] == [*known], "drafts changed a token"
        total = engine.stats().counts.drafts.total
        return VirtualTurn(
            seconds=self.clock.now - begun_at - (self._executor.surplus_s - surplus_s),
            tokens=sum(map(len, found.values())) - num_first,
            steps=steps,
            first_draft=first,
            num_drafted=total.num_drafted - (0 if drafting is None else before.num_drafted),
            num_accepted=total.num_accepted - (0 if drafting is None else before.num_accepted),
        )
