"""The experts of one layer that the expert stage uses, and their weights in banks: those loaded at
start and those taken over later.

T rows, K choices per row, E experts of the layer, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_kernels.interface.adapters import AddingBank, RowAdditions
from moe_kernels.interface.kernels import ExpertBank

MakeBank = Callable[[], ExpertBank]


class ExpertLayer(Protocol):
    """The experts of one layer. `LayerBanks` holds their weights; `MemoryLayer` loads them when
    rows need them."""

    @property
    def held(self) -> frozenset[int]:
        """The experts that may receive rows."""
        ...

    @property
    def whole_bank(self) -> ExpertBank | None:
        """Returns the bank with all experts of the layer, or None if no single bank has them."""
        ...

    @property
    def only_bank(self) -> ExpertBank | None:
        """Returns the bank with all experts that are held here, or None if there are several, or
        if experts come and go."""
        ...

    def take(self, make_bank: MakeBank, experts: Collection[int]) -> None:
        """Takes over experts that are not held yet. `make_bank` reads their weights, if this layer
        reads them right away."""
        ...

    def drop_added(self) -> None:
        """Releases the experts that were taken over."""
        ...

    def own(self, experts: Collection[int]) -> None:
        """Replaces the experts this rank owns by these, and releases the experts that it took
        over."""
        ...

    def total(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Returns the rows' weighted sums [T, D], rounded to fp32."""
        ...

    def partial(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        additions: RowAdditions | None = None,
    ) -> Tensor:
        """Returns the sums [T, D] in fp64 over the experts held here; id -1 marks a choice held
        elsewhere. `additions`: of adapters, to the rows' experts."""
        ...


def partial_sums(
    bank: ExpertBank,
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    additions: RowAdditions | None,
) -> Tensor:
    """Returns a bank's sums [T, D] in fp64; with additions, the bank must be an AddingBank."""
    if additions is None:
        return bank.partial(x_TD, expert_ids_TK, weights_TK)
    assert isinstance(bank, AddingBank), f"{type(bank).__name__} has no additions of adapters"
    return bank.added_partial(x_TD, expert_ids_TK, weights_TK, additions)


@dataclass(frozen=True, slots=True)
class HeldBank:
    """A bank and the experts it contains."""

    bank: ExpertBank
    experts: frozenset[int]


class LayerBanks:
    """Implements ExpertLayer with banks of weights. The first bank holds the rank's own experts,
    later ones replace experts of other ranks.

    Sums over banks are exact (moe_kernels), so the distribution of experts over banks changes no
    bit of the output.
    """

    def __init__(self, num_experts: int, width: int, device: torch.device) -> None:
        self._width, self._device = width, device
        self._banks: tuple[HeldBank, ...] = ()
        self._num_own, self._is_room = 0, False
        # [E + 1]: index of the bank that has an expert, -1 if none. The last entry is for id -1,
        # which indexes it.
        self._bank_E = torch.full((num_experts + 1,), -1, device=device)

    @property
    def held(self) -> frozenset[int]:
        """All experts that are held here."""
        return frozenset().union(*(each.experts for each in self._banks))

    @property
    def whole_bank(self) -> ExpertBank | None:
        """See ExpertLayer.whole_bank. A room has no such bank, as its experts are exchanged."""
        is_whole = len(self.held) == len(self._bank_E) - 1 and len(self._banks) == 1
        return self._banks[0].bank if is_whole and not self._is_room else None

    @property
    def only_bank(self) -> ExpertBank | None:
        """See ExpertLayer.only_bank."""
        return self._banks[0].bank if len(self._banks) == 1 else None

    def put(self, bank: ExpertBank, experts: Collection[int]) -> None:
        """Adds a bank with the rank's own experts; it is never dropped."""
        self.add(bank, experts)
        self._num_own = len(self._banks)

    def put_room(self, bank: ExpertBank, experts: Collection[int]) -> None:
        """Sets the bank whose experts are exchanged by `own`, with the rank's own experts."""
        assert not self._banks, "the bank of a room must be the first bank of its layer"
        self._banks, self._num_own, self._is_room = (HeldBank(bank, frozenset()),), 1, True
        self.own(experts)

    def own(self, experts: Collection[int]) -> None:
        """See ExpertLayer.own. The bank must contain the experts already."""
        assert self._is_room, "own() needs a bank made by put_room()"
        self.drop_added()
        table_E = torch.full_like(self._bank_E, -1)
        table_E[torch.tensor(sorted(experts), dtype=torch.int64, device=self._device)] = 0
        self._banks = (HeldBank(self._banks[0].bank, frozenset(experts)),)
        self._bank_E = table_E

    def take(self, make_bank: MakeBank, experts: Collection[int]) -> None:
        """See ExpertLayer.take. Reads the weights at once."""
        self.add(make_bank(), experts)

    def add(self, bank: ExpertBank, experts: Collection[int]) -> None:
        """Adds a bank with experts that are not held yet."""
        more = frozenset(experts)
        assert more, "a bank needs at least one expert"
        assert max(more) < len(self._bank_E) - 1, (
            f"expert {max(more)} is not one of the layer's {len(self._bank_E) - 1}"
        )
        assert not more & self.held, f"experts {sorted(more & self.held)} are held already"
        table_E = self._bank_E.clone()
        table_E[torch.tensor(sorted(more), device=self._device)] = len(self._banks)
        self._banks, self._bank_E = (*self._banks, HeldBank(bank, more)), table_E

    def drop_added(self) -> None:
        """Releases the banks that were added after `put`."""
        self._bank_E = torch.where(self._bank_E < self._num_own, self._bank_E, -1)
        self._banks = self._banks[: self._num_own]

    def total(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Returns the rows' weighted sums [T, D], rounded to fp32."""
        if len(self._banks) == 1:
            return self._banks[0].bank(x_TD, expert_ids_TK, weights_TK)
        return self.partial(x_TD, expert_ids_TK, weights_TK).float()

    def partial(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        additions: RowAdditions | None = None,
    ) -> Tensor:
        """See ExpertLayer.partial."""
        if len(self._banks) == 1:
            bank = self._banks[0].bank
            return partial_sums(bank, x_TD, expert_ids_TK, weights_TK, additions)
        bank_TK = self._bank_E[expert_ids_TK]
        if self._device.type == "cpu":  # on a GPU this check would wait for the device
            missing = expert_ids_TK[(bank_TK < 0) & (expert_ids_TK >= 0)].unique().tolist()
            assert not missing, f"rows were sent for experts {missing}, which are not here"
        sum_TD = torch.zeros(len(x_TD), self._width, dtype=torch.float64, device=self._device)
        for index, each in enumerate(self._banks):
            ids_TK = torch.where(bank_TK == index, expert_ids_TK, -1)
            sum_TD += partial_sums(each.bank, x_TD, ids_TK, weights_TK, additions)
        return sum_TD
