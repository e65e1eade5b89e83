"""HiGHS for a while, on one program, through scipy."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from experts.placement.solvers.ilp.rows import Rows

_OPTIMAL, _INFEASIBLE = 0, 2  # of scipy's milp
_TOLERANCE = 1e-6  # HiGHS's own, on rows and integers


class Program(Protocol):
    """Least cost under the rows, variables from 0 up; some solution is feasible."""

    cost: NDArray[np.float64]
    upper: NDArray[np.float64]
    is_integer: NDArray[np.float64]
    rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What HiGHS says of a program."""

    x: NDArray[np.float64] | None  # the best solution that it met
    bound: float  # of the cost: none is below; 0 where nothing was proved
    is_optimal: bool  # x is the best


def run_highs(
    program: Program, seconds: float, *, gap: float = 1e-5, most_nodes: int | None = None
) -> Found:
    """Cannot be interrupted: ask for short times. `most_nodes`: a limit that, unlike seconds, ends
    it at the same place on any machine."""
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
    assert result.status != _INFEASIBLE, f"the program has a solution: {result.message}"
    dual = result.mip_dual_bound
    bound = 0.0 if dual is None or not np.isfinite(dual) else max(0.0, dual - _TOLERANCE)
    return Found(x=result.x, bound=bound, is_optimal=result.status == _OPTIMAL)


@contextmanager
def _without_prints() -> Iterator[None]:
    """Some versions of HiGHS print a line of their debugging, past Python, in the middle of a table
    or of a file that goes to standard output: for so long it goes nowhere."""
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
