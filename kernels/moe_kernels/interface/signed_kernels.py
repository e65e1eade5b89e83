"""The contract of kernel sets that compute additions of one bit per weight (`sign_matrix.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from moe_kernels.interface.adapters import AddingBank, Rest, RowAdditions, no_rest
from moe_kernels.interface.kernels import ExpertBank, Linear
from moe_kernels.interface.sign_matrix import SignedExpert, SignMatrix


@runtime_checkable
class SignedKernels(Protocol):
    """A kernel set that has such additions; other sets lack these methods."""

    def signed_linear(self, base: Linear, added: SignMatrix) -> Linear:
        """Makes a layer with the result of another one, to which it adds in fp32. The result is
        rounded again, behind the residual."""
        ...

    def expert_signs(
        self, added: Mapping[int, SignedExpert], is_changed_E: Tensor, rest: Rest = no_rest
    ) -> Any:
        """Prepares the additions to those experts of a layer that this process holds, as
        `AdapterKernels.expert_additions` does."""
        ...


class SignedBank:
    """Implements ExpertBank: a bank, and additions for all its rows."""

    def __init__(self, base: ExpertBank, signs: Any) -> None:
        """`signs`: made by `SignedKernels.expert_signs`."""
        assert isinstance(base, AddingBank), f"{type(base).__name__} has no additions"
        self.base, self.signs = base, signs

    def __call__(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.partial(x_TD, expert_ids_TK, weights_TK).float()

    def partial(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        added = RowAdditions(np.zeros(len(x_TD), dtype=np.int64), [self.signs])
        return self.base.added_partial(x_TD, expert_ids_TK, weights_TK, added)
