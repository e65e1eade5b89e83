"""The control messages about moving experts between ranks while they serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_serve.cluster.control.control_message import ControlMessage

RanksOf = Mapping[int, Sequence[Sequence[int]]]  # layer -> expert -> expert ranks of the epoch


class StagePlacement(ControlMessage, frozen=True):
    """Tells a rank to prepare a placement beside its steps and report when ready. The mappings hold
    only layers that change; `held` and `gained` (to be read) are this rank's, empty for an
    attention rank."""

    placement: int
    ranks_of: RanksOf
    held: Mapping[int, Sequence[int]]
    gained: Mapping[int, Sequence[int]]
    bytes_per_s: float


class DropPlacement(ControlMessage, frozen=True):
    """Tells a rank to drop the staged placement."""


class SwitchPlacement(ControlMessage, frozen=True):
    """Tells a rank to use the staged placement from the next step on."""

    placement: int


class Staged(ControlMessage, frozen=True):
    """Reports that the rank is ready for a placement and has read `num_bytes` for it. A `why` that
    is not empty says why it is not.
    """

    placement: int
    num_bytes: int = 0
    why: str | None = None
