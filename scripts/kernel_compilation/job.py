"""A unit of compilation: a case, by its name, for one chip."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """Sorts as the table does. Kernels themselves cannot be sent to another process."""

    case: str
    target: int
