"""The policy that puts together who shares experts.

Who joins: of those that wait, the one whose expected experts add least to the group that has a seat
for it, unless somebody has been passed over for too long. How a step is split: so that the groups
together are expected to activate fewest experts, with token counts near the balanced split's.
Rows of prompts that are being read are placed by their token counts, or by rank loads.

G groups, D dimensions of the signature table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.batch_policy.ageing import Ageing
from moe_serve.engine.batch_policy.concave_cost import ConcaveCost, Floats
from moe_serve.engine.batch_policy.limits import SizeLimits
from moe_serve.engine.batch_policy.longest_first import split
from moe_serve.engine.batch_policy.policy import PolicyStats
from moe_serve.engine.batch_policy.rank_load import RankLoads
from moe_serve.engine.batch_policy.signature_table import SignatureTable
from moe_serve.engine.batch_policy.standing_split import StandingSplit
from moe_serve.engine.sequence import Sequence
from moe_serve.model.step_plan import MicroBatch, SequenceSlice

_LARGEST_WINDOW = 256


class SignatureSource(Protocol):
    """Where signatures come from: a predictor, or what requests chose so far."""

    @property
    def is_on(self) -> bool:
        """Whether they are good enough to act on."""
        ...

    def refresh(self, waiting: Items[Sequence], running: Items[Sequence]) -> None:
        """Bring the table up to date, as far as the time of a step allows."""
        ...

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """They have ended: out of the table too."""
        ...

    @property
    def recall(self) -> float | None: ...

    @property
    def has_predictor(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the policy may not exceed."""

    window: int = _LARGEST_WINDOW  # of the waiting, how many are compared
    tolerance: float = 0.12  # of token counts, beyond the balanced split's


@dataclass(frozen=True, slots=True)
class _Offer:
    """Who may start now, in which group, and who came earlier and still waits."""

    sequence: Sequence
    group: int
    earlier: tuple[int, ...]


class ExpertAware:
    """Implements BatchPolicy. While its source is off, it is `fifo`."""

    def __init__(
        self,
        source: SignatureSource,
        table: SignatureTable,
        ageing: Ageing,
        cost: ConcaveCost,
        bounds: Bounds,
        loads: RankLoads | None = None,
    ) -> None:
        self._source, self._table, self._ageing = source, table, ageing
        self._cost, self._bounds, self._loads = cost, bounds, loads
        self._splits: dict[int, StandingSplit] = {}  # by the number of groups
        self._num_groups = 1  # of the last step
        self._activated: float | None = None
        self._offer: _Offer | None = None

    def prepare(self, waiting: Items[Sequence], running: Items[Sequence]) -> None:
        """See `BatchPolicy.prepare`."""
        window = list(itertools.islice(waiting, self._bounds.window))
        self._ageing.see(s.id for s in window)
        self._source.refresh(window, running)

    def candidates(self, waiting: Items[Sequence], running: Items[Sequence]) -> Iterator[Sequence]:
        """See `BatchPolicy.candidates`. Who was preempted goes first, as under every policy."""
        self._offer = None  # of the last step: that one did not start
        window = list(itertools.islice(waiting, self._bounds.window))
        if not self._source.is_on:
            yield from waiting
            return
        # They lie in front; one that moved here from a lost rank came last, and has no such right.
        preempted = list(itertools.takewhile(lambda s: s.num_preemptions > 0, window))
        yield from preempted
        yield from self._by_cost(window[len(preempted) :], running)
        yield from itertools.islice(waiting, len(window), None)

    def started(self, sequence: Sequence) -> None:
        """See `BatchPolicy.started`."""
        offer, self._offer = self._offer, None
        if offer is not None and offer.sequence is sequence:
            self._ageing.pass_over(offer.earlier)
            self._standing(self._num_groups).expect(sequence.id, offer.group)
        self._ageing.forget([sequence.id])

    def split(self, slices: list[SequenceSlice], max_micro_batches: int) -> tuple[MicroBatch, ...]:
        """See `BatchPolicy.split`."""
        num_groups = min(max_micro_batches, len(slices))
        if num_groups < 2 or not self._source.is_on or not len(self._table):
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

    def forget(self, sequence_ids: Iterable[int]) -> None:
        gone = list(sequence_ids)
        self._source.forget(gone)
        self._ageing.forget(gone)
        for standing in self._splits.values():
            standing.forget(gone)

    def stats(self) -> PolicyStats:
        source = self._source
        return PolicyStats(
            policy="expert-aware" if source.is_on else "fifo",
            num_passed_over=self._ageing.num_passed_over,
            activated_experts=self._activated if source.is_on else None,
            recall=source.recall,
            is_predictor_on=source.is_on if source.has_predictor else None,
        )

    def _by_cost(self, waiting: list[Sequence], running: Items[Sequence]) -> Iterator[Sequence]:
        standing = self._standing(self._num_groups)
        sums_GD, sizes_G = standing.sums([s.id for s in running])
        x_WD, costs_W = self._table.rows([s.id for s in waiting]), None
        while waiting:
            group = int(sizes_G.argmin())
            if costs_W is None:
                costs_W = self._cost.total(sums_GD[group] + x_WD)
            index = self._ageing.first_urgent(s.id for s in waiting)
            if index is None and sizes_G[group]:
                index = int(costs_W.argmin())
            index = index or 0  # an empty group takes who came first
            sequence, x_D = waiting.pop(index), x_WD[index]
            x_WD, costs_W = np.delete(x_WD, index, axis=0), np.delete(costs_W, index)
            self._offer = _Offer(sequence, group, tuple([s.id for s in waiting[:index]]))
            yield sequence
            if sequence.is_running:
                sums_GD[group] += x_D
                sizes_G[group] += 1
                costs_W = None  # else who is offered next adds what was computed already

    def _prompts(self, balanced: tuple[MicroBatch, ...]) -> list[list[SequenceSlice]]:
        """The slices of several tokens: as the balanced split has them, or, if they are most of
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

    def _standing(self, num_groups: int) -> StandingSplit:
        if num_groups not in self._splits:
            self._splits[num_groups] = StandingSplit(num_groups, self._cost, self._table)
        return self._splits[num_groups]

    def _fixed(self, groups: list[list[SequenceSlice]]) -> tuple[Floats, NDArray[np.int64]]:
        """[G, D] and [G]: what the prompts of each group add up to, about (each token like a coming
        one), and their tokens."""
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
    """Sizes of the balanced split of single tokens."""
    return [(count + index) // num_groups for index in range(num_groups)]
