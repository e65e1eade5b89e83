"""Chooses the drafts of an engine's steps, and learns from their results."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import exp, log1p

from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.engine.drafting.acceptance import Acceptance
from moe_serve.engine.drafting.allowance import DraftingAllowance
from moe_serve.engine.drafting.budget import choose_lengths, with_certain
from moe_serve.engine.drafting.draft import (
    NO_PROPOSALS,
    Draft,
    Drafter,
    DraftSource,
    Proposals,
)
from moe_serve.engine.drafting.draft_search import DraftSearch
from moe_serve.engine.drafting.guessing import Guessing
from moe_serve.engine.drafting.past_answers import PastAnswers
from moe_serve.engine.drafting.patience import Patience
from moe_serve.engine.drafting.shadows import Shadows
from moe_serve.engine.drafting.step_times import StepTimes
from moe_serve.engine.request.draft_counts import DraftCounter, DraftCounts
from moe_serve.engine.request.request import DraftResult
from moe_serve.engine.request.sequence import Schedule, Sequence, StopRule, may_draft

Survivals = dict[int, list[float]]  # by sequence id; see `Acceptance.survivals`
_CERTAIN = 0.95  # survival of the last token of a draft that a grammar forces
_LEAD_WEIGHT = 0.1  # of a new step
_CLEAR_LEAD = 1.6  # gain of drafts that pay even if plain steps are shorter than it seems


class Drafting:
    """Asks drafters for drafts of the sequences that decode, and picks those worth verifying.

    The engine calls `choose` when a step has been scheduled, `note` when it has ended, and `finish`
    and `forget` when sequences end or leave. A draft lives for one step. It never changes a token,
    so a wrong choice costs time only.
    """

    def __init__(
        self,
        drafters: Iterable[Drafter],
        stop: StopRule,
        *,
        vocab_size: int,
        max_tokens: int,
        is_adaptive: bool = True,
        past_answers: PastAnswers | None = None,
        guessing: Guessing | None = None,
        guesses_take_pages: bool = False,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        """`past_answers` is one of the drafters and learns from finished answers. `guessing`
        decides when the network guesses, in the process that samples; its guesses may need pages
        behind a sequence's tokens. Unless `is_adaptive`, every draft is verified with `max_tokens`
        tokens, whatever it costs.
        """
        self._past, self._clock = past_answers, clock
        self._max_tokens, self._is_adaptive = max_tokens, is_adaptive
        self._guessing, self.guesses_take_pages = guessing, guesses_take_pages
        self.num_guesses = 0  # to guess for each sequence after the step that begins
        self._num_sampled = 0  # sequences that may get guesses; 0: `choose` was not called
        self._num_asked = 0  # sequences of the last step that guessed; 0: none did
        self._acceptance, self._times = Acceptance(), StepTimes()
        self._patience, self._follow_patience = Patience(), Patience()  # latter: predictions
        self._search = DraftSearch(
            drafters, self._acceptance, stop, vocab_size=vocab_size, max_tokens=max_tokens
        )
        self._allowance, self._shadows = DraftingAllowance(), Shadows()
        self._proposed = NO_PROPOSALS.of  # of the last step
        self._looked_s = 0.0  # by which lookups made the running step longer
        # of the running step, see `note_step`; `_num_found` drafts are no predictions
        self._gain, self._num_forced, self._num_found = 0.0, 0, 0
        self._lead = 1.0  # average gain of the steps with drafts
        self._are_predictions = False  # the last drafts that were verified
        self._survivals: Survivals | None = None  # of the drafts that `choose` found
        self._counter = DraftCounter()

    @property
    def counts(self) -> DraftCounts:
        """The counts of all drafts so far. Safe from any thread."""
        return self._counter.snapshot()

    def choose(self, schedule: Schedule, most: int) -> dict[int, Draft]:
        """Returns the drafts to verify in a step of at most `most` more rows, by sequence id."""
        self._gain, self._num_forced, self._num_found = 0.0, 0, 0
        self._looked_s, self._survivals = 0.0, {}
        drafts = self._find(schedule)
        chosen = self._chosen(schedule, most, drafts) if drafts else drafts
        if self._guessing is not None:
            self._note_round(len(schedule), chosen)
            num = self._num_sampled = _num_sampled(schedule)
            self.num_guesses = self._guessing.ask(num, self._times.seconds(num))
        return chosen

    def _chosen(self, schedule: Schedule, most: int, drafts: dict[int, Draft]) -> dict[int, Draft]:
        """Returns the parts of the drafts that are worth verifying."""
        if not self._is_adaptive:
            length = min(self._max_tokens, most // len(drafts))
            return {key: draft.cut(length) for key, draft in drafts.items() if length}
        survivals = self._survivals = self._survivals_of(drafts)
        clock = self._clock()
        seconds_of = self._times.seconds(len(schedule))
        lengths = choose_lengths(survivals, len(schedule), most, seconds_of)
        certain = {
            key: len(survivals[key])
            for key, draft in drafts.items()
            if draft.source is DraftSource.GRAMMAR and survivals[key][-1:] > [_CERTAIN]
        }
        if certain:
            lengths = with_certain(lengths, certain, len(schedule), most, seconds_of)
        longest = self._times.num_known(len(schedule)) // max(1, len(lengths))
        for key, length in lengths.items():
            most = self._acceptance.most(key, drafts[key])
            lengths[key] = min(length, most, max(1, longest))
        for key in lengths:
            self._patience_with(drafts[key]).gains([key])
        rest = drafts.keys() - lengths.keys()
        for key in rest:
            self._patience_with(drafts[key]).in_vain(key, sum(survivals[key]))
            self._shadows.keep(schedule[key][0], drafts[key])
        chosen = {key: drafts[key].cut(length) for key, length in lengths.items()}
        seconds = self._clock() - clock
        self._counter.note_seconds(seconds)
        if not chosen:  # the lookups and this time were wasted
            self._looked_s += self._allowance.pay_lookups(0, seconds)
        return chosen

    def expects(self, schedule: Schedule) -> bool:
        """Returns whether the step after this one will probably have drafts. It must not begin
        ahead then, because its drafts depend on the tokens of this step.
        """
        if not self._is_adaptive:
            return bool(self._find(schedule))
        survivals, self._survivals = self._survivals, None
        if survivals is None:  # this step began ahead itself
            survivals = self._survivals_of(self._find(schedule))
        seconds_of = self._times.seconds(len(schedule))
        if self._guessing is not None and self._guessing.is_due(len(schedule), seconds_of):
            return True
        if not survivals:
            return False
        # the first token will be known then, so it need not be drafted
        behind = {key: each[1:] for key, each in survivals.items() if len(each) > 1}
        if choose_lengths(behind, len(schedule), len(schedule) * self._max_tokens, seconds_of):
            return True
        for key, each in survivals.items():
            self._patience.in_vain(key, sum(each))
        return False

    def note(self, sequence_id: int, draft: Draft, num_accepted: int) -> DraftResult:
        """Learns from a draft that was verified. `num_accepted` of its tokens were published."""
        result = DraftResult(draft.source.value, len(draft.token_ids), num_accepted)
        self._acceptance.note(sequence_id, draft, num_accepted)
        self._num_found += draft.source is not DraftSource.PREDICTION
        if draft.source is DraftSource.GRAMMAR:
            self._num_forced += num_accepted
        else:
            self._gain += log1p(num_accepted)
        if num_accepted:
            self._patience_with(draft).accepted(sequence_id)
        self._counter.note(result)
        return result

    def pause(self, schedule: Schedule) -> int:
        """Returns how many steps after the one that begins need not call `choose`, because they
        would have no draft: if the same sequences run in them and nothing is proposed."""
        is_busy = self.num_guesses or self._proposed or not self._is_adaptive
        if is_busy or self._has_past_work:
            return 0
        pause = self._allowance.pause
        if self._allowance.may_draft:
            pause = self._patience.pause(schedule, pause)
        if pause and (followed := self._followed(schedule)):
            pause = min(pause, self._follow_patience.pause(followed))
        if self._guessing is not None:
            seconds_of = self._times.seconds(len(schedule))
            pause = min(pause, self._guessing.pause(len(schedule), seconds_of))
        return pause

    def note_quiet(self, num_rows: int, num_steps: int, seconds: float) -> None:
        """Counts steps that did not call `choose` because of `pause`, and took so long together."""
        self._patience.skip(num_steps)
        self._follow_patience.skip(num_steps)
        self._times.observe(num_rows, seconds / num_steps, num_steps=num_steps)
        self._allowance.settle(num_steps, self._times.seconds(num_rows)(num_rows), 0.0)
        if self._guessing is not None:
            self._guessing.rested(num_rows, num_steps)

    def note_step(
        self, num_rows: int, num_drafted: int, seconds: float, *, reads_prompt: bool
    ) -> None:
        """Learns the time of a step without that of its guesses. `num_drafted` of its rows were
        drafted. The step is worth the time of exp(mean of log(1 + accepted)) plain steps, as in
        `choose_lengths`, and forced tokens are worth their rows in addition.
        """
        if reads_prompt:
            self._allowance.earn(seconds)
            return
        base, seconds = num_rows - num_drafted, max(0.5 * seconds, seconds - self._looked_s)
        won_s = 0.0 if num_drafted else -self._times.cold_s(base)
        self._times.observe(num_rows, seconds, num_drafted=num_drafted)
        seconds_of = self._times.seconds(base)
        step_s = seconds_of(base)
        if num_drafted:  # single steps vary, and averages miss what is new
            seconds = (min(seconds, 3 * seconds_of(num_rows)) + seconds_of(num_rows)) / 2
            worth = exp(self._gain / base) + self._num_forced / base
            won_s = worth * step_s - seconds
            self._lead += _LEAD_WEIGHT * (worth * step_s / seconds - self._lead)
            self._are_predictions = not self._num_found
        self._allowance.settle(1, step_s, won_s, by_predictions=self._are_predictions)

    def note_proposals(self, num_sequences: int, proposals: Proposals) -> None:
        """Keeps the proposals of grammars and of a network after a step of so many sequences, for
        the drafts of the next step."""
        self._proposed = proposals.of
        if self._guessing is None:
            return
        count = self._num_sampled or num_sequences
        if not self.num_guesses:
            self._guessing.rested(count)
        elif proposals.guess_s > 0.0:
            self._guessing.note_time(count, proposals.guess_s)
            self._num_asked = count
        self.num_guesses = self._num_sampled = 0

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """Learns from the answers of sequences that have ended well."""
        if self._past is not None:
            for sequence in sequences:
                if sequence.page_keys and sequence.num_output_tokens:
                    self._past.learn(sequence.page_keys[0], sequence)

    def forget(self, sequence_ids: Collection[int]) -> None:
        """Drops the state of sequences that have ended or moved away."""
        self._acceptance.forget(sequence_ids)
        self._patience.forget(sequence_ids)
        self._follow_patience.forget(sequence_ids)
        self._shadows.forget(sequence_ids)
        self._search.forget(sequence_ids)

    def _note_round(self, num_rows: int, chosen: Mapping[int, Draft]) -> None:
        """Learns the gain and the cost of the guesses of the last step."""
        guessing, num_asked = self._guessing, self._num_asked
        if guessing is None or not num_asked:
            return
        self._num_asked = 0
        guesses = {key: each for key, each in chosen.items() if each.source is guessing.source}
        if not guesses:
            guessing.note_round(num_asked, 1.0, 1.0)
            return
        added = sum(log1p(self._acceptance.expected(key, d)) for key, d in guesses.items())
        all_rows = num_rows + sum([len(draft.token_ids) for draft in chosen.values()])
        other_rows = all_rows - sum([len(draft.token_ids) for draft in guesses.values()])
        seconds_of = self._times.seconds(num_rows)
        rows_time = seconds_of(all_rows) / seconds_of(other_rows)
        guessing.note_round(num_asked, exp(added / num_rows), rows_time)

    def _find(self, schedule: Schedule) -> dict[int, Draft]:
        """Returns the best drafts of the sequences that ask for one."""
        drafts, num_lookups, asking = dict[int, Draft](), 0, self._asking(schedule)
        following = self._followed(schedule)
        if following:
            following = self._follow_patience.awake(following)
        if not (asking or following or self._proposed or self._has_past_work):
            return drafts
        begun_at = self._clock()
        if self._past is not None:
            self._past.work()
        clock = self._clock()
        for key in asking:
            sequence, count = schedule[key]
            if may_draft(sequence, count):
                num_lookups += 1
                draft = self._propose(sequence, searches=True)
                if draft is not None:
                    drafts[key] = draft
                else:
                    self._patience.in_vain(key, None)
            elif not sequence.request.drafts:
                self._patience.in_vain(key, 0.0)
        for key in (*self._proposed, *following):  # these need no search
            if key in schedule and key not in drafts and may_draft(*schedule[key]):
                draft = self._propose(schedule[key][0], searches=False)
                if draft is not None:
                    drafts[key] = draft
                else:
                    self._follow_patience.in_vain(key, None)
        now = self._clock()
        only_follows = bool(following) and not asking
        self._looked_s = self._allowance.pay_lookups(
            num_lookups, now - clock, by_predictions=only_follows
        )
        self._counter.note_seconds(now - begun_at)
        return drafts

    def _asking(self, schedule: Schedule) -> Collection[int]:
        if not self._is_adaptive:
            return schedule
        allowance = self._allowance
        if self._is_plain_due or not allowance.may_draft:
            return ()
        return self._patience.awake(schedule, has_time=allowance.may_look)

    def _followed(self, schedule: Schedule) -> list[int]:
        """Returns the sequences whose client sent a prediction. It is followed also while nothing
        else is looked up for them, because that needs no search."""
        found = [key for key, (sequence, _) in schedule.items() if sequence.request.prediction]
        return found if found and self._allowance.may_follow and not self._is_plain_due else []

    def _patience_with(self, draft: Draft) -> Patience:
        is_prediction = draft.source is DraftSource.PREDICTION
        return self._follow_patience if is_prediction else self._patience

    @property
    def _is_plain_due(self) -> bool:
        return self._times.is_plain_due(is_close=self._lead < _CLEAR_LEAD)

    @property
    def _has_past_work(self) -> bool:
        return self._past is not None and self._past.has_work

    def _survivals_of(self, drafts: Mapping[int, Draft]) -> Survivals:
        return {key: self._acceptance.survivals(key, draft) for key, draft in drafts.items()}

    def _propose(self, sequence: Sequence, *, searches: bool) -> Draft | None:
        """Returns the best draft of a sequence, and judges one that was not verified."""
        shadow = self._shadows.take(sequence)
        if shadow is not None:
            self._acceptance.note(sequence.id, shadow.draft, shadow.num_right)
        return self._search.best(sequence, self._proposed.get(sequence.id), searches=searches)


def _num_sampled(schedule: Schedule) -> int:
    """Returns the number of sequences that get a token from a step and may be given guesses."""
    return sum(
        [s.num_pending_tokens == count and s.request.drafts for s, count in schedule.values()]
    )
