"""The placement by which a rank serves, and the one that it is made ready for."""

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
    """A version, and the tables of who gets which rows if this rank sends rows to others.

    Orders come one after the other, so between two of them there is one version, and steps have it.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self._split: RowSplit | None = None  # None: in no epoch, or others split
        self._use: UseSplit | None = None
        self._staged: StagePlacement | None = None
        self._staged_split: RowSplit | None = None

    def joined(self, split: RowSplit | None, use: UseSplit) -> None:
        """In a new epoch, whose frames are split by this; `use` tells who splits them."""
        assert self._staged is None, f"an epoch begins while {self._staged} is staged"
        self._split, self._use = split, use

    def left(self) -> None:
        """In no epoch any more. What is staged may still come: nobody else may know yet."""
        self._split = self._use = self._staged_split = None

    def stage(self, order: StagePlacement) -> None:
        """Tables are made here, so that a switch takes no time."""
        self._staged = order
        if self._split is not None:
            self._staged_split = self._split.with_layers(order.ranks_of)

    def drop(self) -> None:
        """What was staged does not come."""
        self._staged = self._staged_split = None

    def switch(self, order: SwitchPlacement) -> Mapping[int, Collection[int]]:
        """-> what the rank holds in the layers that change."""
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
        """A step, or an epoch, of another placement would mix two."""
        assert order.placement == self.version, (
            f"{type(order).__name__} of placement {order.placement}, this rank has {self.version}"
        )
