"""The work of a rank between two messages, as one call.

An attention rank adds the sums that the experts sent, runs the next layer up to its router's
choice, and fills in the frames for the experts. An expert rank turns frames with rows into frames
with sums.

T rows of a micro-batch, n of them in a frame, K choices per row, D model width, R expert ranks, E
experts, M the most copies of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moe_kernels.interface.kv_form import KVPages
from moe_kernels.interface.rank_lanes import Lane, StepEnd

TURN_CLOCKS = 3  # see `AttentionTurn.times`


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameShape:
    """The frames of all exchanges.

        rows: header, ids int32 [n, K], weights fp32 [n, K], x [n, D] in the model's dtype
        sums: header, row numbers int32 [n], sums [n, D]

    Each part begins at a multiple of 64 bytes and has room for the rows that were planned. A header
    begins with the key of its exchange (`key_bytes`), which the number of rows follows as uint32.
    """

    num_ranks: int  # expert ranks
    width: int
    top_k: int
    header_bytes: int
    key_bytes: int
    has_choices: bool  # the attention side chooses experts; otherwise ids and weights are not set
    has_wide_sums: bool  # fp64; otherwise fp32, which one expert rank sends


@dataclass(frozen=True, slots=True)
class CopyTable:
    """The ranks of a layer's experts: row r of expert e goes to rank
    ranks_EM[e, (r + first_E[e]) % counts_E[e]]. All int64."""

    ranks_EM: Tensor
    counts_E: Tensor
    first_E: Tensor


@dataclass(frozen=True, slots=True)
class TurnLayer:
    """The next layer: its front, the pages and the step's plan of its attention, and the places of
    its experts (None: there is one rank, or the experts' side chooses)."""

    front: Any  # a LayerFront of the same kernels
    pages: KVPages
    plan: Any
    copies: Any | None  # as `RankCalls.copies` returns them


class WrongFrameError(Exception):
    """A rank's frame is not the one that is expected from it."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"the frame of rank {rank} is not the expected one")
        self.rank = rank


class AttentionTurn(Protocol):
    """A micro-batch on its way through the layers, on an attention rank."""

    hidden_TD: Tensor  # the residual stream: its experts' sums are missing while rows are away
    x_TD: Tensor  # the normed rows of the last layer
    expert_ids_TK: Tensor
    weights_TK: Tensor
    num_rows: int

    @property
    def counts(self) -> list[int]:
        """The number of rows that each rank received in the last layer."""
        ...

    @property
    def times(self) -> tuple[int, ...]:
        """The ns from the last call's begin until sums were added, the front had run, and frames
        were filled in."""
        ...

    def add(self, sums: list[int | None], shared_TD: Tensor | None) -> None:
        """Adds what the experts and the shared expert computed.

        `sums`: the address of each rank's frame; None if it got no rows. Raises WrongFrameError;
        then nothing has changed."""
        ...

    def run(
        self,
        layer: TurnLayer,
        key: bytes,
        rows: list[int],
        sums: list[int | None] | None,
        shared_TD: Tensor | None,
    ) -> list[int]:
        """Does the same if there are `sums`, and runs a layer. Returns the bytes of each rank's
        frame in `rows`, which is a header if it gets no rows."""
        ...


class ExpertService(Protocol):
    """An expert rank's exchanges."""

    def __call__(
        self,
        bank: Any,
        key: bytes,
        rows: list[int],
        sums: list[int],
        planned: list[int],
    ) -> list[int] | None:
        """Multiplies the rows of all senders by a bank of the same kernels.

        Returns the bytes of each frame in `sums`, 0 for a sender without rows. None: a frame is
        not the expected one or rows chose experts that are not here, and nothing was done."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParts:
    """One layer of an expert rank. The router is given if experts are chosen there, and their
    copies with it, unless there is one expert rank."""

    rank: int
    num_experts: int
    router: Any | None = None  # a RouterLinear of the same kernels
    router_shape: Any | None = None
    selection_bias_E: Tensor | None = None
    copies: Any | None = None  # as `RankCalls.copies` returns them


@dataclass(frozen=True, slots=True)
class StepKey:
    """The key of a step's first exchange, and the offsets of layer and micro-batch in it (uint32):
    only these differ between the exchanges of a step."""

    first: bytes
    layer_at: int
    batch_at: int


@dataclass(frozen=True, slots=True)
class ExpertsOfLayer:
    """A layer of an expert rank: its number, its service, and the bank that it uses now."""

    number: int
    service: Any
    bank: Any


class TurnStep(Protocol):
    """The layers of an attention rank as one call, with the messages between them."""

    @property
    def place(self) -> tuple[int, int]:
        """The number of exchanges that were sent, and the rank that is waited for (another number:
        none). Safe from any thread."""
        ...

    def __call__(
        self,
        first: int,
        count: int,
        before: int,
        turns: Sequence[Any],
        plans: Sequence[Sequence[Any]],
        lanes: Sequence[Any],
        key: StepKey,
        before_TD: Sequence[Tensor | None],
        shared_TD: Sequence[Tensor | None],
    ) -> StepEnd:
        """Runs `count` layers, from the place `first` of those given on, until their rows are sent.

        The rows of layer `before` are with the experts. By micro-batch: its turn, the plans of its
        attention by shape, the output of the shared expert of layer `before`, and memory for those
        of the layers (needed if one has a shared expert). `lanes`: to the expert ranks."""
        ...


class ServiceStep(Protocol):
    """The exchanges of an expert rank as one call, with the messages between them."""

    @property
    def place(self) -> tuple[int, int]:
        """See `TurnStep.place`."""
        ...

    def __call__(
        self,
        layers: list[ExpertsOfLayer],
        rows: Sequence[Sequence[int]],
        lanes: Sequence[Any],
        key: StepKey,
    ) -> StepEnd:
        """Serves all exchanges of layers. `rows`: planned, by attention rank and micro-batch.
        `lanes`: to the attention ranks."""
        ...


class RankKernels(Protocol):
    """Makes the calls of both sides."""

    def lane(self, socket: int, timeout_s: float) -> Lane:
        """Returns a link whose notices travel on a socket. A peer that is silent for longer is
        lost."""
        ...

    def turn_step(self, layers: Sequence[tuple[int, TurnLayer, int, Any | None]]) -> TurnStep:
        """Binds layers: each with its number, the place of its attention's shape among the plans,
        and the bank of its shared expert. The plans in them are not used."""
        ...

    def service_step(self) -> ServiceStep: ...

    def copies(self, copies: CopyTable) -> Any:
        """Returns the places of a layer's experts as the calls take them."""
        ...

    def turn(
        self,
        shape: FrameShape,
        hidden_TD: Tensor,
        positions_T: Tensor,
        kv_rows: Tensor,
        *,
        keeps_choices: bool,
    ) -> AttentionTurn:
        """Begins a micro-batch. `keeps_choices`: each layer's ids and weights are new tensors."""
        ...

    def service(self, shape: FrameShape, parts: ServiceParts) -> ExpertService: ...
