"""The attention plan of a recorded step: made once, and filled anew for every step that fits.

A plan of one step (`Kernels.plan_attention`) has the sizes of that step. A recorded one has those
of a `DecodeRoom`: its launches and its addresses stay, only what lies there changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moe_kernels.graphs.graph_sizes import GraphSize
from moe_kernels.interface.attention_shape import StepRows


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRoom:
    """Steps of `size.num_rows` sequences with one token each: up to `size.num_keys` keys over all
    of them, and up to `max_positions` of one."""

    size: GraphSize
    max_positions: int
    page_size: int


class FixedAttention(Protocol):
    """One attention shape of a recorded step."""

    @property
    def plan(self) -> Any:
        """The plan for `Kernels.attend`, as loaded last."""
        ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that a recording reads; they must keep their addresses."""
        ...

    def pack(self, step: StepRows) -> Any:
        """Lay a step out on the host. It has exactly the room's sequences."""
        ...

    def load(self, packed: Any) -> None:
        """Let the plan be that step's, in place and without waiting for a device."""
        ...


class ReplannedAttention:
    """Implements FixedAttention for kernels that plan each step on the host and are never captured:
    another step is another plan."""

    def __init__(self, plan_step: Callable[[StepRows], Any]) -> None:
        self._plan_step = plan_step
        self.plan: Any = None
        self.tensors: tuple[Tensor, ...] = ()

    def pack(self, step: StepRows) -> Any:
        return self._plan_step(step)

    def load(self, packed: Any) -> None:
        self.plan = packed
