"""Decides which expert matrices of a quantised checkpoint stay packed in few bits.

A bank (the experts of a layer, a shared expert, a dense MLP) holds its gate and up projections in
one layout and its down projections in one, so all of its experts must be stored alike. Matrices
that cannot stay packed are dequantised while loading, and the reason is logged once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moe_kernels.interface.kernels import Kernels
from moe_kernels.interface.quantised_matrix import MatrixForm, PackedLayout
from moe_serve.config.sections import WeightsName
from moe_serve.errors import ConfigError
from moe_serve.model.checkpoint.manifest import Stored
from moe_serve.model.load.weight_reader import WeightSource

_log = logging.getLogger(__name__)
_FLOATS = "it is stored in floats"  # not logged as a reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProduct:
    """The tensors that one product of a bank reads: those of all experts, or the fused ones of one.

    `expert`: the expert to look at in a fused tensor. `half`: the number of gate's outputs if gate
    and up are one tensor. `is_transposed`: the tensors are [inputs, outputs].
    """

    tensors: Sequence[Stored]
    expert: int | None = None
    half: int | None = None
    is_interleaved: bool = False
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class BankForms:
    """The forms in which gate and up, and down, stay; None means floats."""

    gate_up: MatrixForm | None = None
    down: MatrixForm | None = None


@dataclass(slots=True)
class ExpertPacking:
    """Decides for each bank, and counts the decisions for routed experts."""

    reader: WeightSource
    kernels: Kernels
    mode: WeightsName
    dtype: torch.dtype
    reasons: list[str] = field(default_factory=list)
    _layouts: Counter[PackedLayout | None] = field(default_factory=Counter)

    def forms(
        self, gate_up: StoredProduct, down: StoredProduct, *, is_routed: bool = True
    ) -> BankForms:
        """Returns a bank's forms.

        ConfigError if routed experts must stay packed (`mode`) and cannot.
        """
        return BankForms(self._form(gate_up, 2, is_routed), self._form(down, 1, is_routed))

    @property
    def description(self) -> str:
        """Describes the packed experts: "experts int4 packed, 4.25 bits"; "" if none is."""
        dtype = str(self.dtype).removeprefix("torch.")
        names = dict.fromkeys(layout.name for layout in self._layouts if layout is not None)
        if not names:
            return ""
        total_bits = sum(
            count * (8.0 * self.dtype.itemsize if layout is None else layout.bits)
            for layout, count in self._layouts.items()
        )
        floats = f" (some {dtype})" if None in self._layouts else ""
        bits = total_bits / self._layouts.total()
        return f"experts {' and '.join(names)} packed{floats}, {bits:.2f} bits"

    def _form(self, product: StoredProduct, num_parts: int, is_routed: bool) -> MatrixForm | None:
        decided = self._decided(product)
        if not isinstance(decided, str):
            form, layout = decided
            if is_routed:
                self._layouts[layout] += num_parts
            return form
        name = product.tensors[0].name
        if self.mode == "packed" and is_routed:
            raise ConfigError(
                f"model.expert_weights is 'packed', but {name} cannot stay packed: {decided}; "
                "use 'auto', or 'dequantised'."
            )
        if is_routed:
            self._layouts[None] += num_parts
        if decided not in ("", _FLOATS) and decided not in self.reasons:
            self.reasons.append(decided)
            _log.warning("experts are dequantised while loading: %s (%s, ...)", decided, name)
        return None

    def _decided(self, product: StoredProduct) -> tuple[MatrixForm, PackedLayout] | str:
        """Returns the form and its layout, or the reason why the product is held in floats: "" if
        that is requested.
        """
        can_pack = self.mode == "packed" or self.kernels.has_packed_products
        if self.mode == "dequantised" or not can_pack:
            return ""
        forms = {self.reader.form(t.name, t.shape, product.expert) for t in product.tensors}
        form = forms.pop()
        if forms:
            return "the experts of a layer are stored in different ways"
        if form is None:
            return _FLOATS
        if form.is_transposed != product.is_transposed:
            turned = form.transposed()
            if turned is None:
                return f"{form.name} of tensors with inputs before outputs"
            form = turned
        layout = self.kernels.packed_layout(form)
        if isinstance(layout, str):
            return layout
        if not _are_parts_apart(product, form):
            return f"{form.name} with blocks that gate and up share"
        return form, layout


def _are_parts_apart(product: StoredProduct, form: MatrixForm) -> bool:
    """Returns whether gate and up, if they are one tensor, each begin with a block of scales."""
    if product.half is None or form.block_rows <= 1:
        return True
    return not product.is_interleaved and product.half % form.block_rows == 0
