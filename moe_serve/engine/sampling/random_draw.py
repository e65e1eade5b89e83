"""Uniform draws that depend on (seed, choice, position) and on nothing else."""

from __future__ import annotations

import numpy as np

_MASK = 2**64 - 1


def uniform(seed: int, choice: int, position: int) -> float:
    """One number in [0, 1), from the counter-based generator Philox (Salmon et al., SC 2011).

    There is no state to share or advance: a neighbour, a preemption, a restart change nothing.
    """
    key = np.array([seed & _MASK, choice], dtype=np.uint64)
    counter = np.array([position, 0, 0, 0], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw()
    return float(int(bits) >> 11) * 2.0**-53
