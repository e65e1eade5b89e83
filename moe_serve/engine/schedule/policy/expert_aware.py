"""The policy that groups sequences that share experts.

The waiting sequence starts whose expected experts add least to the group that has a seat for it,
unless another one has been passed over for too long. A step is split so that its groups together
are expected to activate the fewest experts, with token counts near the balanced split's. Rows of
prompts are placed by their token counts, or by rank loads.

G groups, D dimensions of the signature table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.stats import PolicyStats
from moe_serve.engine.schedule.policy.ageing import Ageing
from moe_serve.engine.schedule.policy.concave_cost import ConcaveCost, Floats
from moe_serve.engine.schedule.policy.expected_experts import ExpectedExperts
from moe_serve.engine.schedule.policy.local_search import SizeLimits
from moe_serve.engine.schedule.policy.longest_first import split
from moe_serve.engine.schedule.policy.policy import SignatureSource
from moe_serve.engine.schedule.policy.rank_load import RankLoads
from moe_serve.engine.schedule.policy.signature_table import SignatureTable
from moe_serve.engine.schedule.policy.standing_split import StandingSplit
from moe_serve.model.step_plan import MicroBatch, SequenceSlice

_LARGEST_WINDOW = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of the policy."""

    window: int = _LARGEST_WINDOW  # waiting sequences that are compared
    tolerance: float = 0.12  # of token counts around the balanced split's


@dataclass(frozen=True, slots=True)
class _Queue:
    """The W waiting sequences in order of arrival, and their state while candidates are offered."""

    sequences: list[Sequence]
    is_open_W: NDArray[np.bool_]  # not offered yet
    is_waiting_W: NDArray[np.bool_]  # not started, and not waiting for a page being computed

    @classmethod
    def of(cls, sequences: list[Sequence]) -> _Queue:
        count = len(sequences)
        return cls(sequences, np.ones(count, dtype=np.bool_), np.ones(count, dtype=np.bool_))

    def is_kept_back(self, index: int) -> bool:
        """Returns whether it was offered and found no pages."""
        return bool(self.is_waiting_W[index] and not self.is_open_W[index])

    def in_order(self, urgent: list[int], costs_W: Floats) -> Iterator[int]:
        """Yields the open ones: first those that can wait no longer, then by cost; ties by
        arrival."""
        yield from (index for index in urgent if self.is_open_W[index])
        if self.is_open_W.any():  # usually the first one starts, which saves sorting
            yield int(np.where(self.is_open_W, costs_W, np.inf).argmin())
            order = np.argsort(costs_W, kind="stable")
            yield from order[self.is_open_W[order]].tolist()


@dataclass(frozen=True, slots=True)
class _ExpertOffer:
    """The sequence offered now, its group, and its place in the queue."""

    sequence: Sequence
    group: int
    index: int  # in the queue
    is_urgent: bool
    queue: _Queue

    @property
    def earlier(self) -> list[int]:
        """Returns the ids of earlier sequences that still wait and could have been chosen."""
        before = np.flatnonzero(self.queue.is_waiting_W[: self.index])
        return [self.queue.sequences[place].id for place in before]


class ExpertAware:
    """Implements BatchPolicy. Behaves like `fifo` while its source is off."""

    def __init__(
        self,
        source: SignatureSource,
        table: SignatureTable,
        ageing: Ageing,
        cost: ConcaveCost,
        bounds: Bounds,
        loads: RankLoads | None = None,
        expected: ExpectedExperts | None = None,
    ) -> None:
        """`loads` are those of expert ranks, if known. `expected` is set for an expert memory."""
        self._expected = expected
        self._source, self._table, self._ageing = source, table, ageing
        self._cost, self._bounds, self._loads = cost, bounds, loads
        self._splits: dict[int, StandingSplit] = {}  # by the number of groups
        self._num_groups = 1  # in the last step
        self._activated: float | None = None
        self._offer: _ExpertOffer | None = None
        self._late: list[int] = []  # sequences that became urgent when the last one started

    def prepare(self, waiting: Items[Sequence], running: Items[Sequence]) -> None:
        """See `BatchPolicy.prepare`."""
        window = list(itertools.islice(waiting, self._bounds.window))
        self._ageing.see((s.id for s in reversed(waiting)), (s.id for s in window))
        self._source.refresh(window, running)

    def candidates(self, waiting: Items[Sequence], running: Items[Sequence]) -> Iterator[Sequence]:
        """See `BatchPolicy.candidates`. Preempted sequences go first, as under every policy."""
        self._offer = None  # an offer of the last step did not start
        window = list(itertools.islice(waiting, self._bounds.window))
        if not self._source.is_on:
            yield from waiting
            return
        # Preempted sequences are in front. One that moved here from a lost rank is at the end,
        # without precedence.
        preempted = list(itertools.takewhile(lambda s: s.num_restarts > 0, window))
        yield from preempted
        yield from self._by_cost(window[len(preempted) :], running)
        yield from itertools.islice(waiting, len(window), None)

    def is_next(self, sequence: Sequence) -> bool:
        """See `BatchPolicy.is_next`. True only for the first one and for urgent ones. A later one
        that was chosen for its experts and finds no pages is passed over and holds back no other.
        """
        offer = self._offer
        if offer is None or offer.sequence is not sequence or offer.is_urgent:
            return True
        offer.queue.is_waiting_W[offer.index] = True
        return not offer.queue.is_waiting_W[: offer.index].any()

    def started(self, sequence: Sequence) -> None:
        """See `BatchPolicy.started`."""
        offer, self._offer = self._offer, None
        self._late = []
        if offer is not None and offer.sequence is sequence:
            self._late = self._ageing.pass_over(offer.earlier)
            self._standing(self._num_groups).expect(sequence.id, offer.group)
        self._ageing.forget([sequence.id])

    def split(self, slices: list[SequenceSlice], max_micro_batches: int) -> tuple[MicroBatch, ...]:
        """See `BatchPolicy.split`."""
        num_groups = min(max_micro_batches, len(slices))
        if num_groups < 2 or not self._source.is_on or not len(self._table):
            self._activated = self._alone(slices)
            return split(slices, max_micro_batches)
        single = [s for s in slices if len(s.token_ids) == 1]
        groups: list[list[SequenceSlice]] = [[] for _ in range(num_groups)]
        sizes = _even(len(slices), num_groups)
        if len(single) < len(slices):
            balanced = split(slices, max_micro_batches)
            groups, sizes = self._prompts(balanced), [b.num_tokens for b in balanced]
        limits = SizeLimits.near(sizes, self._bounds.tolerance)
        standing = self._standing(num_groups)
        fixed_GD, fixed_sizes = self._fixed(groups)
        chosen = standing.update([s.sequence_id for s in single], fixed_GD, fixed_sizes, limits)
        for piece, group in zip(single, chosen, strict=True):
            groups[group].append(piece)
        self._num_groups, self._activated = num_groups, standing.cost_total * self._table.scale
        return tuple(MicroBatch(tuple(group)) for group in groups if group)

    def needed(self, slices: list[SequenceSlice]) -> Floats | None:
        """See `BatchPolicy.needed`."""
        return None if self._expected is None else self._expected.of(slices)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        gone = list(sequence_ids)
        self._source.forget(gone)
        self._ageing.forget(gone)
        for standing in self._splits.values():
            standing.forget(gone)

    def stats(self) -> PolicyStats:
        source, is_counted = self._source, self._cost.capacity == 1
        return PolicyStats(
            policy="expert-aware" if source.is_on else "fifo",
            num_passed_over=self._ageing.num_passed_over,
            activated_experts=self._activated if source.is_on and is_counted else None,
            recall=source.recall,
            is_predictor_on=source.is_on if source.has_predictor else None,
            num_learnt=source.num_learnt,
        )

    def _by_cost(self, waiting: list[Sequence], running: Items[Sequence]) -> Iterator[Sequence]:
        """Yields candidates by cost. The order stays valid until one starts."""
        standing, queue = self._standing(self._num_groups), _Queue.of(waiting)
        sums_GD, sizes_G = standing.sums([s.id for s in running])
        ids = [s.id for s in waiting]
        place = {key: index for index, key in enumerate(ids)}
        x_WD, urgent = self._table.rows(ids), self._ageing.urgent(ids)
        with_each = self._cost.with_each(x_WD)
        while queue.is_open_W.any():
            group = int(sizes_G.argmin())
            if any(queue.is_kept_back(index) for index in urgent):
                return
            costs_W = np.zeros(
                len(waiting), dtype=np.float32
            )  # an empty group: in order of arrival
            if sizes_G[group]:
                costs_W = with_each(sums_GD[group])
            for index in queue.in_order(urgent, costs_W):
                sequence = waiting[index]
                queue.is_open_W[index] = queue.is_waiting_W[index] = False
                self._offer = _ExpertOffer(sequence, group, index, index in urgent, queue)
                yield sequence
                if sequence.is_running:
                    sums_GD[group] += x_WD[index]
                    sizes_G[group] += 1
                    if self._late:
                        urgent = sorted([*urgent, *(place[key] for key in self._late)])
                    break

    def _prompts(self, balanced: tuple[MicroBatch, ...]) -> list[list[SequenceSlice]]:
        """Groups the slices of several tokens: as in the balanced split, or, if they are most of
        the step and ranks are known, so that the ranks' loads are even."""
        groups = [[s for s in batch.slices if len(s.token_ids) > 1] for batch in balanced]
        prompts = [s for group in groups for s in group]
        num_tokens = sum(batch.num_tokens for batch in balanced)
        if self._loads is None or 2 * sum(len(s.token_ids) for s in prompts) < num_tokens:
            return groups
        found = [self._table.signature(s.sequence_id) for s in prompts]
        signatures = [signature for signature in found if signature is not None]
        if len(signatures) < len(prompts):
            return groups
        spare = int(self._bounds.tolerance * num_tokens / len(balanced))
        return self._loads.place(prompts, signatures, len(balanced), spare)

    def _alone(self, slices: list[SequenceSlice]) -> float | None:
        """Returns the expected activated experts of an unsplit step; None if unknown."""
        if not slices or not len(self._table):
            return None
        sums_GD, _ = self._fixed([slices])
        return float(self._cost.total(sums_GD)[0]) * self._table.scale

    def _standing(self, num_groups: int) -> StandingSplit:
        if num_groups not in self._splits:
            self._splits[num_groups] = StandingSplit(num_groups, self._cost, self._table)
        return self._splits[num_groups]

    def _fixed(self, groups: list[list[SequenceSlice]]) -> tuple[Floats, NDArray[np.int64]]:
        """Returns the approximate feature sums [G, D] of each group's prompts, treating each token
        like a coming one, and their tokens [G]."""
        none = self._table.rows([])
        sums_GD = np.zeros((len(groups), none.shape[1]), dtype=np.float32)
        sizes_G = np.zeros(len(groups), dtype=np.int64)
        for group, slices in enumerate(groups):
            if slices:
                counts_R = np.array([len(s.token_ids) for s in slices])
                x_RD = self._table.rows([s.sequence_id for s in slices])
                sums_GD[group] = counts_R.astype(np.float32) @ x_RD
                sizes_G[group] = counts_R.sum()
        return sums_GD, sizes_G


def _even(count: int, num_groups: int) -> list[int]:
    """Returns the sizes of the balanced split of single tokens."""
    return [(count + index) // num_groups for index in range(num_groups)]
