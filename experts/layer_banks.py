"""One layer's experts that are here, in one bank or several: as loaded, and as taken over later.

T rows, K choices per row, E experts of the layer, D model width.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.expert_layer import MakeBank
from moe_kernels.interface.kernels import ExpertBank


@dataclass(frozen=True, slots=True)
class HeldBank:
    """A bank, and the experts that it has."""

    bank: ExpertBank
    experts: frozenset[int]


class LayerBanks:
    """Implements ExpertLayer: the banks of a layer. The first is what the rank was given, later
    ones stand in for others.

    Sums of banks are exact (moe_kernels), so how experts lie on banks changes no bit.
    """

    def __init__(self, num_experts: int, width: int, device: torch.device) -> None:
        self._width, self._device = width, device
        self._banks: tuple[HeldBank, ...] = ()
        self._num_own, self._is_room = 0, False
        # [E + 1]: which bank has an expert, -1: none. The last is for id -1, which indexes it.
        self._bank_E = torch.full((num_experts + 1,), -1, device=device)

    @property
    def held(self) -> frozenset[int]:
        """All experts that are here."""
        return frozenset().union(*(each.experts for each in self._banks))

    def put(self, bank: ExpertBank, experts: Collection[int]) -> None:
        """What the rank was given: it stays."""
        self.add(bank, experts)
        self._num_own = len(self._banks)

    def put_room(self, bank: ExpertBank, experts: Collection[int]) -> None:
        """What the rank was given, in a bank whose experts come and go: see `own`."""
        assert not self._banks, "a room is the first bank"
        self._banks, self._num_own, self._is_room = (HeldBank(bank, frozenset()),), 1, True
        self.own(experts)

    def own(self, experts: Collection[int]) -> None:
        """See ExpertLayer.own. The bank has them already."""
        assert self._is_room, "the experts of this bank stay"
        self.drop_added()
        table_E = torch.full_like(self._bank_E, -1)
        table_E[torch.tensor(sorted(experts), dtype=torch.int64, device=self._device)] = 0
        self._banks = (HeldBank(self._banks[0].bank, frozenset(experts)),)
        self._bank_E = table_E

    def take(self, make_bank: MakeBank, experts: Collection[int]) -> None:
        """See ExpertLayer.take: read at once."""
        self.add(make_bank(), experts)

    def add(self, bank: ExpertBank, experts: Collection[int]) -> None:
        """Another bank, with experts that are not here yet."""
        more = frozenset(experts)
        assert more, "a bank without experts"
        assert max(more) < len(self._bank_E) - 1, f"expert {max(more)} of {len(self._bank_E) - 1}"
        assert not more & self.held, f"experts {sorted(more & self.held)} are here already"
        table_E = self._bank_E.clone()
        table_E[torch.tensor(sorted(more), device=self._device)] = len(self._banks)
        self._banks, self._bank_E = (*self._banks, HeldBank(bank, more)), table_E

    def drop_added(self) -> None:
        """Let go of what was added after `put`."""
        self._bank_E = torch.where(self._bank_E < self._num_own, self._bank_E, -1)
        self._banks = self._banks[: self._num_own]

    def total(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The rows' weighted sums [T, D], rounded to fp32."""
        if len(self._banks) == 1:
            return self._banks[0].bank(x_TD, expert_ids_TK, weights_TK)
        return self.partial(x_TD, expert_ids_TK, weights_TK).float()

    def partial(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The sums [T, D] in fp64, over the choices that are here; -1 lives elsewhere."""
        if len(self._banks) == 1:
            return self._banks[0].bank.partial(x_TD, expert_ids_TK, weights_TK)
        bank_TK = self._bank_E[expert_ids_TK]
        if self._device.type == "cpu":  # elsewhere the question would wait for the device
            missing = expert_ids_TK[(bank_TK < 0) & (expert_ids_TK >= 0)].unique().tolist()
            assert not missing, f"rows were sent for experts {missing}, which are not here"
        sum_TD = torch.zeros(len(x_TD), self._width, dtype=torch.float64, device=self._device)
        for index, each in enumerate(self._banks):
            ids_TK = torch.where(bank_TK == index, expert_ids_TK, -1)
            sum_TD += each.bank.partial(x_TD, ids_TK, weights_TK)
        return sum_TD
