"""The contract of kernel sets that compute additions of one bit per weight (`sign_matrix.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from moe_kernels.interface.kernels import ExpertBank, GatedActivation, Linear
from moe_kernels.interface.sign_matrix import SignedExpert, SignMatrix


@runtime_checkable
class SignedKernels(Protocol):
    """A kernel set that has such additions; other sets lack these methods."""

    def signed_linear(self, base: Linear, added: SignMatrix) -> Linear:
        """Makes a layer with the result of another one, and an addition in fp32."""
        ...

    def signed_experts(
        self,
        base: Sequence[ExpertBank | None],
        added: Sequence[SignedExpert | None],
        activation: GatedActivation,
    ) -> ExpertBank:
        """Makes a bank of experts with additions. `base`: the bank that holds each expert, which
        stays there and is not copied; None, also in `added`: the expert is not in this bank."""
        ...
