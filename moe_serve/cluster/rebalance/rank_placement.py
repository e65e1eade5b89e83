"""The placement by which a rank serves, and the staged one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from moe_serve.cluster.control.messages import (
    Join,
    RunStep,
    ServeStep,
    StagePlacement,
    SwitchPlacement,
)
from moe_serve.pipeline.exchange.row_split import RowSplit

UseSplit = Callable[[RowSplit], None]


class RankPlacement:
    """Holds a version, and the split of rows among expert ranks if this rank sends rows.

    Orders are handled one after the other, so between two of them there is one version, which the
    steps use.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self._split: RowSplit | None = None  # None: in no epoch, or other ranks split
        self._use: UseSplit | None = None
        self._staged: StagePlacement | None = None
        self._staged_split: RowSplit | None = None

    def joined(self, split: RowSplit | None, use: UseSplit) -> None:
        """Notes a new epoch, whose rows `split` divides; `use` hands a split to whatever divides
        them."""
        assert self._staged is None, f"an epoch begins while {self._staged} is staged"
        self._split, self._use = split, use

    def left(self) -> None:
        """Notes that the rank is in no epoch. The staged placement may still be switched to: the
        coordinator may not know yet."""
        self._split = self._use = self._staged_split = None

    def stage(self, order: StagePlacement) -> None:
        """Stages a placement. Its tables are made here, so that a switch takes no time."""
        self._staged = order
        if self._split is not None:
            self._staged_split = self._split.with_layers(order.ranks_of)

    def drop(self) -> None:
        """Drops the staged placement."""
        self._staged = self._staged_split = None

    def switch(self, order: SwitchPlacement) -> Mapping[int, Collection[int]]:
        """Switches to the staged placement; returns what the rank holds in the layers that
        change."""
        staged, split, use = self._staged, self._staged_split, self._use
        assert staged is not None and staged.placement == order.placement, (
            f"placement {order.placement} was not staged: {staged}"
        )
        if split is not None and use is not None:
            use(split)
            self._split = split
        self.version = order.placement
        self.drop()
        return staged.held

    def check(self, order: RunStep | ServeStep | Join) -> None:
        """Asserts that a step or an epoch has this placement: another would mix two."""
        assert order.placement == self.version, (
            f"{type(order).__name__} of placement {order.placement}, this rank has {self.version}"
        )
