"""Additions of one bit per weight in plain torch; the signs become floats in every call.

T rows, N outputs, K inputs, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from moe_kernels.interface.kernels import Linear
from moe_kernels.interface.sign_matrix import SignedExpert, SignMatrix
from moe_kernels.reference.expert_mlp import AnyMLP, ExpertMLP, QuantisedMLP, activate
from moe_kernels.reference.linear import PlainLinear


class TorchSignedLinear:
    """Implements Linear: the result of another layer, and the addition."""

    __slots__ = ("_added", "_base")

    def __init__(self, base: Linear, added: SignMatrix) -> None:
        self._base, self._added = base, added

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        y_TN = self._base(x_TK) if residual_TN is None else self._base(x_TK, residual_TN)
        return with_added(y_TN, x_TK, self._added)


def with_added(y_TN: Tensor, x_TK: Tensor, added: SignMatrix | None) -> Tensor:
    """Returns a product and the addition to it, summed in fp32 and rounded to y's dtype."""
    if added is None:
        return y_TN
    signed_TN = PlainLinear(added.signs())(x_TK.float())
    sum_TN = y_TN.float() + added.every_scale() * signed_TN
    if added.bias_N is not None:
        sum_TN = sum_TN + added.bias_N
    return sum_TN.to(y_TN.dtype)


class SignedMLP:
    """An expert with additions to its matrices."""

    __slots__ = ("_activation", "_added", "_base")

    def __init__(self, base: ExpertMLP | QuantisedMLP, added: SignedExpert) -> None:
        self._base, self._added = base, added

    def __call__(self, x_TD: Tensor) -> Tensor:
        base, added = self._base, self._added
        if isinstance(base, QuantisedMLP):
            base = ExpertMLP.from_weights(base.weights, base.activation, x_TD.dtype)
        gate = with_added(base.gate(x_TD), x_TD, added.gate)
        up = with_added(base.up(x_TD), x_TD, added.up)
        hidden = activate(gate.float(), up.float(), base.activation).to(x_TD.dtype)
        return with_added(base.down(hidden), hidden, added.down)


class TorchExpertSigns:
    """The additions to a layer's experts."""

    def __init__(self, added: Mapping[int, SignedExpert], is_changed_E: Tensor) -> None:
        self._added, self._is_changed = dict(added), is_changed_E.tolist()
        self.num_bytes = sum(each.nbytes for each in self._added.values())

    def of(self, experts: Sequence[AnyMLP | None]) -> list[AnyMLP | None]:
        """Returns a bank's experts with the additions. An expert without an addition here is
        None."""
        return [self._changed(*item) for item in enumerate(experts)]

    def _changed(self, expert: int, base: AnyMLP | None) -> AnyMLP | None:
        if base is None or not self._is_changed[expert]:
            return base
        added = self._added.get(expert)
        assert isinstance(base, ExpertMLP | QuantisedMLP), "an expert of the base model"
        return None if added is None else SignedMLP(base, added)
