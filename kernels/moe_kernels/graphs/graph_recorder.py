"""Recording work once and running it again: what a CUDA graph is, without saying CUDA.

A recorded function takes nothing and returns nothing: it reads and writes tensors that keep their
addresses. Whoever runs it again fills its inputs before and reads its outputs after, on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

Addresses = Callable[[], Sequence[Tensor]]


class Recording(Protocol):
    """Work that was recorded."""

    def replay(self) -> None:
        """Run it with what its inputs hold now. Returns before a device has done it."""
        ...


class Recorder(Protocol):
    """Records functions, all on one device; the largest first, so that the others fit into the
    memory that it took."""

    def record(self, function: Callable[[], None], fixed: Addresses) -> Recording:
        """Record a function, which may run a few times for that. `fixed` gives the tensors that it
        reads and writes from outside: they must be at the same addresses at every replay."""
        ...

    @property
    def num_bytes(self) -> int:
        """Device memory that the recordings take so far."""
        ...
