"""Computes from the cost model the most that a trained head can gain.

The head guesses behind every token of answers that were made without drafts, and its guesses are
compared with the tokens that follow. v(n), the time of a step with n rows over one with one, and c,
the time of a guess over that of a step, are measured as processor time in the same engine. Then the
time of the answers with drafts is computed: each step verifies some guesses, and takes v(1 + their
number) + c x (the number of guesses made).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moe_serve.engine.drafting.draft import DraftProposal, DraftSource
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.drafting.guessing import Guessing
from moe_serve.engine.drafting.oracle import Oracle
from moe_serve.engine.execute.step_drafter import HeadDrafter, StepDrafter
from moe_serve.engine.execute.verify import Verified
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sequence import Sequence as Answer
from moe_serve.model.speculation_head import Guess
from moe_serve.model.step_plan import StepPlan

from .turns import Bench

_MOST = 4
_BUCKETS = 10  # of confidences
_LEAST = tuple(step / 20 for step in range(1, 20))  # survivals below which no guess is verified

MakeRequests = Callable[[int], list[GenerationRequest]]


@dataclass(frozen=True, slots=True)
class Place:
    """The guesses behind one token: their confidences, and whether each is the token that came."""

    confidences: tuple[int, ...]
    is_right: tuple[bool, ...]


@dataclass(slots=True)
class _Recorder:
    """Implements GuessingNetwork: keeps a head's guesses, and proposes none."""

    head: HeadDrafter
    guesses: list[Guess] = field(default_factory=list)
    seconds: float = 0.0

    def follow(self, plan: StepPlan, found: Verified, sequences: Mapping[int, Answer]) -> None:
        """See GuessingNetwork."""

    def guess(self, plan: StepPlan, found: Verified) -> dict[int, DraftProposal]:
        """See GuessingNetwork. There is one sequence."""
        clock = time.thread_time()
        (made,) = self.head.guess(plan, found).values()
        self.seconds += time.thread_time() - clock
        self.guesses.append(Guess(made.token_ids, made.confidences))
        return {}


def head_limits(bench: Bench, asked: Mapping[str, MakeRequests], rounds: int) -> Iterator[str]:
    """Yields lines for each kind of requests, which come one at a time."""
    for name, make in asked.items():
        recorder = _Recorder(_head_of(bench))
        requests = [make(number) for number in range(rounds)]
        answers = [_recorded(bench, each, recorder) for each in requests]
        places = [_places(answer, guesses) for answer, guesses in answers]
        times = _row_times(bench, requests, [answer for answer, _ in answers])
        num_guesses = sum(len(guesses) for _, guesses in answers) * _MOST
        cost = recorder.seconds / num_guesses / times[0]
        yield from _lines(name, places, [seconds / times[0] for seconds in times], cost)


def _lines(
    name: str, places: Sequence[Sequence[Place]], v: Sequence[float], cost: float
) -> Iterator[str]:
    every = [place for answer in places for place in answer]
    yield f"{name}: {len(every)} places; c = {cost:.3f}; " + ", ".join(
        f"v({rows}) = {ratio:.2f}" for rows, ratio in enumerate(v, 1)
    )
    shares = _shares_by_position(every)
    yield f"  right once those before were: {', '.join(f'{share:.2f}' for share in shares)}"
    rates = _rates(every)
    yield "  right by confidence (%): " + ", ".join(
        f"{10 * bucket}+: {rate:.2f} ({share:.0%})" for bucket, (rate, share) in rates.items()
    )
    by_bucket = {bucket: rate for bucket, (rate, _) in rates.items()}
    for title, each in (("guesses that cost c", cost), ("free guesses", 0.0)):
        fixed = {k: _speed(places, v, each, lambda place, k=k: (k, k)) for k in (1, 2, 3, 4)}  # type: ignore[misc]
        best = max(fixed, key=fixed.__getitem__)
        by_least = {
            least: _speed(places, v, each, _by_confidence(by_bucket, least)) for least in _LEAST
        }
        top = max(by_least, key=by_least.__getitem__)
        yield (
            f"  {title}: {fixed[best]:.2f}x with always {best}, {by_least[top]:.2f}x where all "
            f"before are right with {top:.2f} or more"
        )
    knowing = _speed(places, v, 0.0, lambda place: (_num_right(place), 0))
    yield f"  free guesses, and the wrong ones are known before: {knowing:.2f}x"


def _by_confidence(rates: Mapping[int, float], least: float) -> Callable[[Place], tuple[int, int]]:
    """Verifies guesses while they are probable enough. The first improbable guess is made too."""

    def verified(place: Place) -> tuple[int, int]:
        survival = 1.0
        for count, confidence in enumerate(place.confidences):
            survival *= rates[_bucket(confidence)]
            if survival < least:
                return count, count + 1
        return len(place.confidences), len(place.confidences)

    return verified


def _speed(
    places: Sequence[Sequence[Place]],
    v: Sequence[float],
    cost: float,
    choice: Callable[[Place], tuple[int, int]],
) -> float:
    """Steps through the answers. `choice` gives how many guesses are verified and made."""
    tokens, seconds = 0, 0.0
    for answer in places:
        at = 0
        while at < len(answer):
            verified, made = choice(answer[at])
            verified = min(verified, len(answer) - at - 1)
            step = 1 + min(verified, _num_right(answer[at]))
            tokens, seconds, at = tokens + step, seconds + v[verified] + cost * made, at + step
    return tokens / seconds


def _num_right(place: Place) -> int:
    return next((i for i, ok in enumerate(place.is_right) if not ok), len(place.is_right))


def _shares_by_position(places: Sequence[Place]) -> list[float]:
    counts = [_num_right(place) for place in places]
    return [
        sum(count > i for count in counts) / max(1, sum(count >= i for count in counts))
        for i in range(_MOST)
    ]


def _rates(places: Sequence[Place]) -> dict[int, tuple[float, float]]:
    """Returns by bucket of confidence the share of right guesses among those after right ones, and
    the bucket's share of such guesses."""
    tried, right = [0] * _BUCKETS, [0] * _BUCKETS
    for place in places:
        for count in range(min(_num_right(place) + 1, len(place.confidences))):
            bucket = _bucket(place.confidences[count])
            tried[bucket] += 1
            right[bucket] += place.is_right[count]
    return {
        bucket: (right[bucket] / max(1, tried[bucket]), tried[bucket] / sum(tried))
        for bucket in range(_BUCKETS)
    }


def _bucket(confidence: int) -> int:
    return min(confidence * _BUCKETS // 100, _BUCKETS - 1)


def _places(answer: Sequence[int], guesses: Sequence[Guess]) -> list[Place]:
    """Compares the guesses behind each token with the tokens that follow it."""
    places = []
    for at, guess in enumerate(guesses[: len(answer) - 1]):
        following = answer[at + 1 : at + 1 + _MOST]
        guessed = guess.token_ids[: len(following)]
        is_right = tuple(a == b for a, b in zip(guessed, following, strict=True))
        places.append(Place(guess.confidences[: len(following)], is_right))
    return places


def _head_of(bench: Bench) -> HeadDrafter:
    drafter = bench.step_drafter
    assert drafter is not None and isinstance(drafter.network, HeadDrafter), "a head is loaded"
    return drafter.network


def _recorded(
    bench: Bench, requests: list[GenerationRequest], recorder: _Recorder
) -> tuple[list[int], list[Guess]]:
    """Returns the answer of the one request, and the guesses behind each of its tokens."""
    recorder.head.least_confidence = 0.0
    recorder.guesses = []
    own, bench.step_drafter = bench.step_drafter, StepDrafter(None, recorder)
    head = Guessing(DraftSource.HEAD, _MOST, is_adaptive=False)
    turn = bench.turn(requests, _plain(bench, guessing=head))
    bench.step_drafter = own
    (answer,) = turn.answers.values()
    return answer, recorder.guesses


def _row_times(
    bench: Bench, requests: Sequence[list[GenerationRequest]], answers: Sequence[list[int]]
) -> list[float]:
    """Returns the processor time of a step that verifies 0, 1, ... right tokens."""
    times = []
    for most in range(_MOST + 1):
        turns = []
        for asked, answer in zip(requests, answers, strict=True):
            oracle = Oracle({"r0": answer}, vocab_size=bench.built.layout.vocab_size)
            drafting = _plain(bench, oracle, max_tokens=max(1, most)) if most else None
            turns.append(bench.turn(asked, drafting))
        times.append(sum(turn.cpu_s for turn in turns) / sum(turn.steps for turn in turns))
    return times


def _plain(
    bench: Bench, *drafters: Oracle, max_tokens: int = 1, guessing: Guessing | None = None
) -> Drafting:
    return Drafting(
        drafters,
        bench.engine.stop_rule,
        vocab_size=bench.built.layout.vocab_size,
        max_tokens=max_tokens,
        is_adaptive=False,
        guessing=guessing,
    )
