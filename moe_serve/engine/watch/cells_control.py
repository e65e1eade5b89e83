"""The operator's interface to the cells of a server; `cluster/cells` implements it."""

from __future__ import annotations

from typing import Protocol


class CellsControl(Protocol):
    """Controls which cells take requests. Safe from any thread. `EngineStats.cells` lists them."""

    def drain(self, index: int, *, is_draining: bool) -> None:
        """Stops or resumes giving requests to a cell; its running ones move away. Raises
        CellsError, and changes nothing, if there is no such cell or no other one is left."""
        ...
