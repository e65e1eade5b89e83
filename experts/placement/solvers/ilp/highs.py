"""Runs HiGHS through scipy on one program, for a limited time."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Term = tuple[NDArray[np.int64], NDArray[np.floating] | float]  # variables, a factor or factors


@dataclass(slots=True)
class Rows:
    """Collects constraints low <= A x <= high entry by entry."""

    row: list[NDArray[np.int64]] = field(default_factory=list)
    column: list[NDArray[np.int64]] = field(default_factory=list)
    value: list[NDArray[np.float64]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[Term], low: float, high: float) -> None:
        """Adds one constraint."""
        for variables, factors in terms:
            flat = np.ravel(variables)
            self.row.append(np.full(len(flat), len(self.low)))
            self.column.append(flat)
            self.value.append(np.broadcast_to(np.ravel(np.asarray(factors, float)), flat.shape))
        self.low.append(low)
        self.high.append(high)


_OPTIMAL, _INFEASIBLE = 0, 2  # status codes of scipy's milp
_TOLERANCE = 1e-6  # HiGHS's own tolerance, for rows and integers


class Program(Protocol):
    """A program: minimise the cost under the rows, with variables from 0 up; a feasible solution
    exists."""

    cost: NDArray[np.float64]
    upper: NDArray[np.float64]
    is_integer: NDArray[np.float64]
    rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of HiGHS for a program."""

    x: NDArray[np.float64] | None  # the best solution found
    bound: float  # lower bound of the cost; 0 if nothing was proved
    is_optimal: bool  # x is optimal


def run_highs(
    program: Program, seconds: float, *, gap: float = 1e-5, most_nodes: int | None = None
) -> Found:
    """Solves a program. HiGHS cannot be interrupted, so use short times. Unlike `seconds`, the
    limit `most_nodes` ends it at the same point on every machine."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    rows = program.rows
    matrix = csr_array(
        (np.concatenate(rows.value), (np.concatenate(rows.row), np.concatenate(rows.column))),
        (len(rows.low), len(program.cost)),
    )
    options = {"time_limit": max(0.05, seconds), "mip_rel_gap": gap}
    if most_nodes is not None:
        options["node_limit"] = most_nodes
    with _without_prints():
        result = milp(
            program.cost,
            integrality=program.is_integer,
            bounds=Bounds(0.0, program.upper),
            constraints=LinearConstraint(matrix, np.array(rows.low), np.array(rows.high)),
            options=options,
        )
    assert result.status != _INFEASIBLE, (
        f"HiGHS found no solution of a feasible program: {result.message}"
    )
    dual = result.mip_dual_bound
    bound = 0.0 if dual is None or not np.isfinite(dual) else max(0.0, dual - _TOLERANCE)
    return Found(x=result.x, bound=bound, is_optimal=result.status == _OPTIMAL)


@contextmanager
def _without_prints() -> Iterator[None]:
    """Discards what HiGHS prints. Some versions print a debugging line past Python, which would end
    up in the middle of a table or of a file written to standard output."""
    if os.name != "posix":
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
        ctypes.CDLL(None).fflush(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
