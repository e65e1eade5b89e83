"""Sends an engine's steps to the attention rank that computes them."""

from __future__ import annotations

from collections.abc import Mapping

from moe_serve.cluster.control.messages import (
    OpenSequence,
    PageWork,
    QueryPages,
    Slice,
    StepDone,
)
from moe_serve.cluster.ranks.choice_packing import unpack_choices
from moe_serve.cluster.ranks.mirror import pack_params, pack_tokens
from moe_serve.cluster.steps.step_in_flight import RankWork, StepCoordinator
from moe_serve.engine.execute.step_outcome import StepOutcome
from moe_serve.engine.request.sequence import Sequence
from moe_serve.model.step_plan import SequenceSlice, StepPlan


class RemoteExecutor:
    """Implements StepExecutor for one process of an attention rank. It remembers what the rank
    knows, so that a step's message holds only what is new."""

    def __init__(
        self, coordinator: StepCoordinator, name: str, before: RemoteExecutor | None = None
    ) -> None:
        """`before` is the rank's last executor. If its process is still there, the process forgets
        that executor's sequences and clears their pages.
        """
        self._coordinator, self.name = coordinator, name
        self.start = coordinator.epoch.starts[name]  # number of the process
        self._tables: dict[int, tuple[int, ...]] = {}  # of sequences that the rank mirrors
        self._closed: list[int] = []
        self._page_work: list[PageWork] = []
        if before is not None and before.start == self.start:
            self._closed = [*before._closed, *before._tables]
            self.clear_pages(sorted({page for t in before._tables.values() for page in t}))

    @property
    def is_there(self) -> bool:
        """Returns True if that process is in the epoch."""
        return self._coordinator.is_in(self.name, self.start)

    @property
    def expert_memory(self) -> None:
        """Returns None, because expert ranks report on their own memories."""

    def run(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> StepOutcome:
        """Runs a step of this rank alone. Raises RankLostError, or the computation's error."""
        outcome = self._coordinator.run({self.name: self.prepare(plan, sequences)})[self.name]
        if isinstance(outcome, Exception):
            raise outcome
        return as_outcome(outcome)

    def prepare(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> RankWork:
        """Returns the plan as messages. They must be sent, because this object then assumes that
        the rank knows them.
        """
        opened = tuple(
            _opened(sequences[key])
            for key in dict.fromkeys(piece.sequence_id for piece in plan.slices)
            if key not in self._tables
        )
        batches = tuple(
            tuple(self._slice(piece) for piece in batch.slices) for batch in plan.micro_batches
        )
        closed, self._closed = tuple(self._closed), []
        return RankWork(
            start=self.start,
            micro_batches=batches,
            opened=opened,
            closed=closed,
            page_work=self._take_work(),
            routes=plan.routes,
            needed_LE=plan.needed_LE,
            parked=plan.parked,
            num_guesses=plan.num_guesses,
        )

    def resend_tables(self) -> None:
        """Sends all page tables again, because the rank may lack those of the last prepared
        step.
        """
        self._tables = dict.fromkeys(self._tables, ())

    def forget(self, sequence_ids: list[int]) -> None:
        """See `StepExecutor.forget`; sent with the next step."""
        known = [key for key in sequence_ids if self._tables.pop(key, None) is not None]
        self._closed += known

    def clear_pages(self, pages: list[int]) -> None:
        """Takes effect before the next step."""
        if pages:
            self._page_work.append(PageWork(clear=pages))

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Takes effect before the next step."""
        if pairs:
            self._page_work.append(PageWork(copy=pairs))

    def save_page(self, page: int, slot: int) -> None:
        """Copies a page to a slot of the memory tier before the next step."""
        self._page_work.append(PageWork(save=((page, slot),)))

    def load_page(self, slot: int, page: int) -> None:
        """Copies a slot of the memory tier to a page before the next step."""
        self._page_work.append(PageWork(load=((slot, page),)))

    @property
    def has_page_work(self) -> bool:
        """See `StepExecutor.has_page_work`."""
        return bool(self._page_work)

    def finish_page_work(self) -> None:
        """See `StepExecutor.finish_page_work`. Waits for the rank; raises RankLostError."""
        self.finite_pages([1])

    def finish_copies(self, page: int) -> None:
        """Makes the rank do its page work now, and waits for it. Raises RankLostError. `page` may
        be any page, because the rank answers about pages.
        """
        self.finite_pages([page])

    def finite_pages(self, pages: list[int]) -> list[bool]:
        """Asks the rank; raises RankLostError."""
        if not pages:
            return []
        order = QueryPages(page_work=self._take_work(), pages=pages)
        return self._coordinator.query_pages(self.name, self.start, order)

    def _take_work(self) -> tuple[PageWork, ...]:
        work, self._page_work = tuple(self._page_work), []
        return work

    def _slice(self, piece: SequenceSlice) -> Slice:
        known, table = self._tables.get(piece.sequence_id, ()), piece.page_table
        first = len(known) if table[: len(known)] == known else 0
        self._tables[piece.sequence_id] = table
        return Slice(
            piece.sequence_id,
            piece.start,
            len(piece.token_ids),
            piece.num_logits,
            first,
            table[first:],
            pack_tokens(piece.drafted) if piece.num_drafted else b"",
            piece.layers,
            piece.num_dropped,
        )


def as_outcome(done: StepDone) -> StepOutcome:
    """Converts a rank's report on its step for the engine."""
    prompts = {key: tuple(entries) for key, entries in done.prompt_logprobs.items()}
    choices = None if done.choices is None else unpack_choices(done.choices)
    return StepOutcome(
        sampled=done.sampled,
        failures=done.failures,
        prompt_logprobs=prompts,
        choices=choices,
        mask_costs=done.mask_costs,
        spoiled=done.spoiled,
        proposals=done.proposals,
    )


def _opened(sequence: Sequence) -> OpenSequence:
    prompt, adapter = sequence.token_ids[: sequence.num_prompt_tokens], sequence.request.adapter
    return OpenSequence(
        sequence.id,
        pack_tokens(prompt),
        pack_tokens(sequence.token_ids[sequence.num_prompt_tokens :]),
        pack_params(sequence.request.params, sequence.rules),
        sequence.request.choice,
        sequence.seed,
        0 if adapter is None else adapter.weights.number,
    )
