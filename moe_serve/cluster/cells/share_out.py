"""Gives each request to the cell with the least work, and requests of lost ranks to another."""

from __future__ import annotations

from collections.abc import Sequence

from moe_serve.cluster.cells.cell import Cell
from moe_serve.engine.request.request import FinishReason, TokenDelta
from moe_serve.engine.request.sequence import Sequence as EngineSequence


class ShareOut:
    """Keeps requests while no cell is live."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = cells
        self._homeless: list[EngineSequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self._homeless)

    @property
    def waiting(self) -> Sequence[EngineSequence]:
        return self._homeless

    def add(self, sequence: EngineSequence) -> None:
        live = [cell for cell in self._cells if cell.is_live]
        homes = [cell for cell in live if not cell.is_draining] or live
        if not homes:
            self._homeless.append(sequence)
            return
        home = min(homes, key=lambda cell: cell.num_pending_tokens)
        min(home.rank_engines.values(), key=lambda e: e.num_pending_tokens).adopt(sequence)

    def abort(self, request_id: str) -> list[TokenDelta] | None:
        kept = [s for s in self._homeless if s.request.request_id != request_id]
        if len(kept) == len(self._homeless):
            return None
        self._homeless = kept
        return [TokenDelta(request_id=request_id, finish_reason=FinishReason.ABORT)]

    def before_step(self, cell: Cell) -> None:
        """Does nothing."""

    def after_step(self, cell: Cell) -> None:
        """Does nothing."""

    def turn(self) -> bool:
        homeless, self._homeless = self._homeless, []
        for sequence in homeless:
            self.add(sequence)
        return len(self._homeless) < len(homeless)

    def rank_lost(self, cell: Cell, rank: str, sequences: list[EngineSequence]) -> None:
        for sequence in sequences:
            self.add(sequence)

    def check_integrity(self) -> None:
        """Has nothing to check."""
