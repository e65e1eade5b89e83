"""Holds the drafts of an engine's running step, with the pages that they need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from moe_serve.clock import Clock
from moe_serve.engine.drafting.draft import NO_PROPOSALS, Draft, Proposals
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.request.draft_counts import DraftCounts
from moe_serve.engine.request.request import DraftResult
from moe_serve.engine.request.sequence import Schedule, Sequence
from moe_serve.engine.schedule.scheduler import Scheduler
from moe_serve.model.step_plan import StepPlan

NO_DRAFTS: Mapping[int, Draft] = {}


class StepDrafts:
    """Connects a `Drafting` with a scheduler. Without one there are never any drafts.

    Drafts take rows of the step's budget and free pages that are left after every sequence has its
    own. They never preempt or evict, and pages for tokens that were refused are given back when the
    step ends.
    """

    def __init__(self, scheduler: Scheduler, drafting: Drafting | None, clock: Clock) -> None:
        self._scheduler, self._drafting, self._clock = scheduler, drafting, clock
        self.running: Mapping[int, Draft] = NO_DRAFTS  # by sequence id
        self._begun_at = self._ended_at = clock()
        self._extended: set[int] = set()  # sequences with pages behind their next token
        self._resting: set[int] = set()  # spoiled sequences, whose next step has no draft
        self._quiet: frozenset[int] = frozenset()  # sequences of a pause, in which none has a draft
        self._num_quiet = self._num_left = 0  # ended and remaining steps of the pause
        self._quiet_s = 0.0  # time of the ended ones
        self._has_chosen = False  # in the running step

    @property
    def counts(self) -> DraftCounts:
        return DraftCounts() if self._drafting is None else self._drafting.counts

    def use(self, drafting: Drafting | None, clock: Clock | None = None) -> None:
        """Changes the drafting, and the clock that measures steps. It must be called between
        steps."""
        self._clock = self._clock if clock is None else clock
        self._begun_at = self._ended_at = self._clock()
        self._drafting, self._has_chosen = drafting, False
        self._num_quiet, self._num_left, self._quiet_s = 0, 0, 0.0

    def begin(self, schedule: Schedule) -> None:
        """Chooses the drafts of a step that has been scheduled."""
        self.running = NO_DRAFTS
        if self._drafting is None:
            return
        self._begun_at = self._clock()
        if self._num_left and schedule.keys() == self._quiet:
            return
        self._end_pause(self._drafting)
        self._has_chosen = True
        if self._resting:
            rested = self._resting & schedule.keys()
            self._resting -= rested
            schedule = {key: item for key, item in schedule.items() if key not in rested}
        drafts: dict[int, Draft] = {}
        drafting = self._drafting
        chosen = drafting.choose(schedule, self._scheduler.num_spare_rows)
        num_more = drafting.num_guesses if drafting.guesses_take_pages else 0
        for key in schedule if num_more else chosen:
            sequence, draft = schedule[key][0], chosen.get(key)
            if draft is None and sequence.num_pending_tokens > 1:
                continue  # it reads its prompt
            num_drafted = 0 if draft is None else len(draft.token_ids)
            room = self._give_pages(sequence, num_drafted + num_more)
            self._extended.add(key)
            if draft is not None and room:
                drafts[key] = draft.cut(room)
        self.running = drafts
        if not drafts and (pause := drafting.pause(schedule)):
            self._quiet, self._num_left = frozenset(schedule), pause

    def ask_guesses(self, plan: StepPlan) -> StepPlan:
        """Returns the plan of the step that has begun with the guesses to make behind it."""
        num_guesses = 0 if self._drafting is None else self._drafting.num_guesses
        return replace(plan, num_guesses=num_guesses) if num_guesses else plan

    def _give_pages(self, sequence: Sequence, num_drafted: int) -> int:
        """Gives a scheduled sequence pages for drafted tokens behind its next one. Returns the
        number of tokens for which there is room. No page is taken from the prefix cache or from
        another sequence.
        """
        cache, end = self._scheduler.cache, sequence.num_tokens + num_drafted
        missing = min(max(0, sequence.num_missing_pages(end)), cache.num_free)
        if missing:
            sequence.page_table += cache.allocate(missing)
        room = len(sequence.page_table) * cache.page_size - sequence.num_tokens
        return min(num_drafted, room)

    def allow_ahead(self, schedule: Schedule) -> bool:
        """Returns whether the next step may begin before this one has ended: this step has no
        drafts, and the next one will probably have none."""
        if self._drafting is None:
            return True
        num_left = self._num_left if self._has_chosen else self._num_left - 1
        if num_left > 0 and schedule.keys() == self._quiet:
            return True
        self._end_pause(self._drafting)
        is_certain = not (self.running or self._drafting.num_guesses)
        return is_certain and not self._drafting.expects(schedule)

    def _end_pause(self, drafting: Drafting) -> None:
        """Ends a pause in which no sequence asks for a draft."""
        if self._num_quiet:
            drafting.note_quiet(len(self._quiet), self._num_quiet, self._quiet_s)
        self._num_quiet, self._num_left, self._quiet_s = 0, 0, 0.0

    def result(self, sequence: Sequence, num_tokens: int) -> DraftResult | None:
        """Learns from the draft of a sequence that got `num_tokens` tokens, if it had one."""
        draft = self.running.get(sequence.id)
        if draft is None or self._drafting is None:
            return None
        return self._drafting.note(sequence.id, draft, num_tokens - 1)

    def give_back(self, schedule: Schedule, spoiled: Collection[int]) -> None:
        """Takes back the pages behind the tokens of scheduled sequences. A `spoiled` one may have
        NaNs in the rest of its last page, so it loses that page and computes its tokens again."""
        if not self._extended:
            return
        for key in [key for key in schedule if key in self._extended]:
            sequence = schedule[key][0]
            if sequence.is_running:
                num_kept = sequence.num_tokens
                if key in spoiled:
                    self._resting.add(key)
                    size = sequence.page_size
                    num_kept = (sequence.num_tokens - 1) // size * size
                self._scheduler.truncate(sequence, num_kept)

    def put_off(self, schedule: Schedule) -> Schedule:
        """Returns the part of a failed step that had no drafts. The others continue in the next
        step, because their pages may hold anything."""
        drafting = self.running.keys() & schedule.keys()
        self.give_back(schedule, drafting)
        return {key: item for key, item in schedule.items() if key not in drafting}

    def end(self, schedule: Schedule, proposals: Proposals | None) -> None:
        """Learns the time of a step that has ended. `proposals`: those of the outcome; None if the
        step failed."""
        drafting, drafts, self.running = self._drafting, self.running, NO_DRAFTS
        self._extended.clear()
        if drafting is None:
            return
        now, begun_at = self._clock(), max(self._begun_at, self._ended_at)
        self._ended_at = now
        found = NO_PROPOSALS if proposals is None else proposals
        is_quiet, self._has_chosen = self._num_left > 0 and not self._has_chosen, False
        if is_quiet:
            self._num_quiet += 1
            self._num_left -= 1
            self._quiet_s += now - begun_at
            if found.of:
                self._end_pause(drafting)
                drafting.note_proposals(len(schedule), found)
            return
        drafting.note_proposals(len(schedule), found)
        if proposals is not None:
            num_drafted = sum([len(draft.token_ids) for draft in drafts.values()])
            drafting.note_step(
                len(schedule) + num_drafted,
                num_drafted,
                max(0.0, now - begun_at - found.guess_s),
                reads_prompt=[count for _, count in schedule.values()].count(1) < len(schedule),
            )

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """Learns from the answers of sequences that end."""
        if self._drafting is not None:
            self._drafting.finish(sequences)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Drops the state of sequences that leave the engine."""
        if self._drafting is not None:
            ids = [sequence.id for sequence in sequences]
            self._resting.difference_update(ids)
            self._drafting.forget(ids)
