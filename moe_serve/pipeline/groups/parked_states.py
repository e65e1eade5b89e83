"""Keeps the residual stream of prompt tokens between the steps that take them through the layers.

n tokens of a sequence, D model width.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from moe_serve.errors import MoeServeError
from moe_serve.model.step_plan import SequenceSlice, StepPlan


class ParkedStateError(MoeServeError):
    """A step needs a state that is not here."""


class ParkedStates:
    """The states of one rank, or of one of its shards.

    A state stays until a later step shows that it is not needed any more, so that a step can be
    repeated: a sequence has up to two states, before the last step's layers and behind them.
    """

    def __init__(self) -> None:
        self._states: dict[int, dict[int, Tensor]] = {}  # sequence -> next layer -> [n, D]
        self._not_finite: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Size of all states."""
        return sum(
            state_nD.numel() * state_nD.element_size()
            for states in self._states.values()
            for state_nD in states.values()
        )

    def begin(self, plan: StepPlan) -> None:
        """Begins a step: drop the states that neither it nor a later one needs."""
        self._not_finite.clear()
        if not self._states:
            return
        self._states = {key: self._states[key] for key in plan.parked if key in self._states}
        for piece in plan.slices:
            states = self._states.get(piece.sequence_id)
            if states is None:
                continue
            first = 0 if piece.layers is None else piece.layers.first
            self._states[piece.sequence_id] = {
                layer: state for layer, state in states.items() if layer == first
            }

    def take(self, piece: SequenceSlice) -> Tensor:
        """Returns the state of tokens that join at the first of their layers, [n, D]. A state that
        is not finite is noted, see `not_finite`. Raises ParkedStateError."""
        assert piece.layers is not None and piece.layers.first, "the tokens were parked"
        layer, count = piece.layers.first, len(piece.token_ids)
        state_nD = self._states.get(piece.sequence_id, {}).get(layer)
        if state_nD is None or len(state_nD) != count:
            found = "none" if state_nD is None else f"{len(state_nD)} rows"
            raise ParkedStateError(
                f"the state of sequence {piece.sequence_id} before layer {layer} has {found}, but "
                f"{count} rows are needed: its prompt is read again."
            )
        if not state_nD.isfinite().all():
            self._not_finite.add(piece.sequence_id)
        return state_nD

    def park(self, piece: SequenceSlice, state_nD: Tensor) -> None:
        """Keeps the state of tokens that leave behind the last of their layers."""
        assert piece.layers is not None, "the tokens take part in all layers"
        self._states.setdefault(piece.sequence_id, {})[piece.layers.end] = state_nD

    @property
    def not_finite(self) -> frozenset[int]:
        """The sequences whose states had a NaN or an infinity in this step."""
        return frozenset(self._not_finite)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drops the states of sequences that have ended or moved away."""
        for key in sequence_ids:
            self._states.pop(key, None)
