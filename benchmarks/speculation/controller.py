"""Compares the controller with fixed lengths of drafts in virtual time.

The answers are recorded once with the real model. Then the real controller runs with them on
machines whose steps take the time of a table, so every run on every machine prints the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moe_serve.config.sections import SpeculationConfig
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.drafting.drafting_maker import drafting_maker
from moe_serve.engine.drafting.oracle import Oracle
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.text.tokenizer import Tokenizer

from .turns import Bench
from .virtual_steps import Machine, VirtualBench, VirtualTurn
from .workloads import natural, with_predictions

BATCHES = (1, 2, 4, 8, 16, 32, 64)
_FIXED = (1, 3, 5, 8)
_TOKENS = 96
_GREEDY, _WARM, _HOT = 0.0, 0.7, 1.0
MACHINES = (
    Machine(),
    Machine("rows 1.4 as dear", drafted=1.4),
    Machine("rows 0.7 as dear", drafted=0.7),
    Machine("a plain step takes twice as long", plain=2.0, lookup_s=50e-6, further_lookup_s=12e-6),
    Machine("lookups twice as dear", lookup_s=50e-6, further_lookup_s=16e-6),
    Machine("a first draft that is slow", first_draft_s=500e-6),
    Machine("plain steps behind drafts that are slow", behind=1.5),
    Machine("steps that vary by a third, and pauses", noise=0.3, pauses=0.02),
    *(
        Machine(
            f"all of that, and slow spells ({seed})",
            plain=1.5,
            lookup_s=50e-6,
            further_lookup_s=12e-6,
            first_draft_s=500e-6,
            drafted=1.2,
            noise=0.3,
            pauses=0.02,
            slower=1.33,
            seed=seed,
        )
        for seed in (7, 8, 9)
    ),
)

Answers = dict[str, list[int]]
Turns = list[tuple[list[GenerationRequest], Answers]]


class Recordings:
    """Answers of the model to the requests of `natural`, by temperature and number."""

    def __init__(self, tokenizer: Tokenizer, known: dict[tuple[float, int], list[int]]) -> None:
        self._tokenizer, self._known = tokenizer, known

    @classmethod
    def record(cls, bench: Bench, rounds: int) -> Recordings:
        """Has the model answer."""
        tokenizer, known = Tokenizer.load(bench.built.layout.folder), {}
        for temperature, num in ((_GREEDY, 16), (_WARM, 64 * (2 + rounds)), (_HOT, 64)):
            for first in range(0, num, 64):
                asked = natural(tokenizer, min(64, num), _TOKENS, temperature, first=first)
                answers = bench.turn(asked, None).answers
                for place in range(len(asked)):
                    known[temperature, first + place] = answers[f"r{place}"]
        return cls(tokenizer, known)

    def asked(
        self, batch: int, temperature: float, first: int = 0, num_tokens: int = _TOKENS
    ) -> tuple[list[GenerationRequest], Answers]:
        """Returns requests and their answers."""
        requests = natural(self._tokenizer, batch, num_tokens, temperature, first=first)
        is_greedy = temperature == _GREEDY
        numbers = [(first + i) % 16 if is_greedy else first + i for i in range(batch)]
        return requests, {f"r{i}": self._known[temperature, n] for i, n in enumerate(numbers)}


@dataclass(frozen=True, slots=True)
class Share:
    """The controller on one workload. `turns`: gains over off; `first_drafts`: the decode steps
    that verified the first draft of each turn."""

    workload: str
    machine: str
    gain: float
    best: str
    share: float  # of the gain of the best fixed length
    turns: tuple[float, ...]
    first_drafts: tuple[int | None, ...]

    def __str__(self) -> str:
        turns = " ".join(f"{turn:.2f}" for turn in self.turns)
        firsts = " ".join("-" if step is None else str(step) for step in self.first_drafts)
        return (
            f"{self.workload:24} {self.gain:5.2f} of off, {self.share:5.2f} of {self.best:6} "
            f"turns {turns}; first drafts in steps {firsts}"
        )


class VirtualParts:
    """The workloads on one machine."""

    def __init__(self, recordings: Recordings, machine: Machine, rounds: int) -> None:
        self._recordings, self._machine, self._rounds = recordings, machine, rounds

    def repeated(self, batch: int) -> Share:
        """The same greedy requests again and again; the first time no draft is in the store."""
        asked = self._recordings.asked(batch, _GREEDY)
        return self._against_fixed(f"repeated, batch {batch}", [asked] * (1 + self._rounds))

    def natural(self, batch: int) -> Share:
        """Other requests each time, sampled."""
        turns = [
            self._recordings.asked(batch, _WARM, first=number * batch)
            for number in range(1 + self._rounds)
        ]
        return self._against_fixed(f"natural, batch {batch}", turns)

    def never_right(self, batch: int) -> Share:
        """Drafts of which no token is right, in each step."""
        asked = self._recordings.asked(batch, _HOT, num_tokens=80)

        def make(bench: VirtualBench) -> Drafting:
            oracle = Oracle({}, 0.0, vocab_size=4096)
            return Drafting(
                [oracle], bench.engine.stop_rule, vocab_size=4096, max_tokens=16, clock=bench.clock
            )

        gains, firsts = self._gains([asked] * self._rounds, make)
        return self._share(f"never right, batch {batch}", gains, firsts, {})

    def changing(self, batch: int) -> Share:
        """Requests that repeat, behind and before others that do not."""
        same = self._recordings.asked(batch, _GREEDY)
        others = [self._recordings.asked(batch, _WARM, first=n * batch) for n in range(4)]
        turns = [same, *others[:3], same, same, others[3], same]
        return self._against_fixed(f"changing, batch {batch}", turns)

    def mixed(self, batch: int) -> Share:
        """Batches of which every second request repeats."""
        turns = []
        for number in range(1 + self._rounds):
            same, known = self._recordings.asked(batch, _GREEDY)
            other, answers = self._recordings.asked(batch, _WARM, first=number * batch)
            both = [(other if i % 2 else same)[i] for i in range(batch)]
            found = {f"r{i}": (answers if i % 2 else known)[f"r{i}"] for i in range(batch)}
            turns.append((both, found))
        return self._against_fixed(f"mixed, batch {batch}", turns)

    def prediction(self, share: float) -> Share:
        """One request whose client sends the answer with a share of its tokens edited."""
        turns = []
        for number in range(1 + self._rounds):
            asked, answers = self._recordings.asked(1, _GREEDY, first=number)
            turns.append((with_predictions(asked, answers, share, 4096), answers))
        return self._against_fixed(f"prediction, {share:.0%} edited", turns)

    def _against_fixed(self, workload: str, turns: Turns) -> Share:
        gains, firsts = self._gains(turns, self._maker(None))
        fixed = {
            f"K = {length}": self._gains(turns, self._maker(length))[0][1:] for length in _FIXED
        }
        return self._share(workload, gains[1:], firsts[1:], fixed)

    def _maker(self, length: int | None) -> Callable[[VirtualBench], Drafting]:
        config = SpeculationConfig(method="auto")
        if length is not None:
            config = replace(config, max_tokens=length, is_adaptive=False)

        def make(bench: VirtualBench) -> Drafting:
            drafting = drafting_maker(config, 4096, bench.engine.stop_rule, bench.clock)()
            assert drafting is not None, "the method is not off"
            return drafting

        return make

    def _gains(
        self, turns: Turns, make: Callable[[VirtualBench], Drafting]
    ) -> tuple[list[float], list[int | None]]:
        """Returns by turn the gain over a turn without drafts, and the step of the first draft."""
        bench = VirtualBench(self._machine)
        drafting = bench.charged(make(bench))
        gains, firsts = list[float](), list[int | None]()
        for number, (asked, answers) in enumerate(turns):
            found = dict[bool, VirtualTurn]()
            for is_on in (False, True) if number % 2 else (True, False):
                found[is_on] = bench.turn(asked, answers, drafting if is_on else None)
            gains.append(found[True].tokens_per_s / found[False].tokens_per_s)
            firsts.append(found[True].first_draft)
        return gains, firsts

    def _share(
        self,
        workload: str,
        gains: Sequence[float],
        firsts: Sequence[int | None],
        fixed: Mapping[str, Sequence[float]],
    ) -> Share:
        medians = {"off": 1.0} | {name: statistics.median(each) for name, each in fixed.items()}
        best, gain = max(medians, key=medians.__getitem__), statistics.median(gains)
        return Share(
            workload=workload,
            machine=self._machine.name,
            gain=gain,
            best=best,
            share=gain / medians[best],
            turns=tuple(gains),
            first_drafts=tuple(firsts),
        )


def shares(recordings: Recordings, machine: Machine, rounds: int) -> Iterator[Share]:
    """Yields all workloads at all batch sizes."""
    parts = VirtualParts(recordings, machine, rounds)
    for kind in (parts.repeated, parts.natural, parts.never_right, parts.changing, parts.mixed):
        for batch in BATCHES:
            yield kind(batch)
    for share in (0.05, 0.2):
        yield parts.prediction(share)


def controller_lines(bench: Bench, rounds: int) -> Iterator[str]:
    """Yields a line for each workload, batch and machine, and the worst ones."""
    recordings = Recordings.record(bench, rounds)
    worst = dict[str, Share]()
    for machine in MACHINES:
        yield f"{machine.name}:"
        for found in shares(recordings, machine, rounds):
            yield f"  {found}"
            kind = found.workload.partition(",")[0]
            if kind not in worst or found.share < worst[kind].share:
                worst[kind] = found
    yield "the least shares of the best setting:"
    for found in worst.values():
        yield f"  {found.share:.2f} {found.workload}, {found.machine}"
