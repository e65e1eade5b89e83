"""Decides which linear layers of a quantised checkpoint stay packed in few bits: the projections of
attention and the output head.

Queries, keys and values are one layer, so they must be stored alike. Matrices that cannot stay
packed are dequantised while loading, and the reason is logged once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moe_kernels.interface.kernels import Kernels
from moe_kernels.interface.quantised_matrix import PackedLayout, Weight
from moe_serve.config.sections import WeightsName
from moe_serve.errors import ConfigError
from moe_serve.model.checkpoint.manifest import Stored, Table, attention_table
from moe_serve.model.checkpoint.tensor_names import TensorNames
from moe_serve.model.load.expert_packing import ExpertPacking
from moe_serve.model.load.weight_reader import ModelTensors, WeightSource
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.tensor_shard import AttentionWeights

_log = logging.getLogger(__name__)
# Keys of `attention_table` that are matrices of linear layers (kv_b becomes one matrix per head).
LINEAR_KEYS = frozenset(("q", "k", "v", "o", "q_a", "q_b", "kv_a"))
_TOGETHER = ("q", "k", "v")
_FLOATS = "it is stored in floats"  # not logged as a reason


@dataclass(slots=True)
class LinearPacking:
    """Decides for each layer, counts the decisions, and reads as decided."""

    reader: WeightSource
    kernels: Kernels
    mode: WeightsName
    reasons: list[str] = field(default_factory=list)
    _layouts: Counter[PackedLayout] = field(default_factory=Counter)
    _packed: set[str] = field(default_factory=set)  # names of tensors

    def decide(self, table: Table) -> None:
        """Decides for the matrices of an `attention_table` or `model_table`.

        ConfigError if they must stay packed (`mode`) and one that is stored in few bits cannot.
        """
        alone = [(key,) for key in ("o", "q_a", "q_b", "kv_a", "head") if key in table]
        both = _TOGETHER if "k" in table else ("q",)
        for layer in (both, *alone):
            tensors = [table[key] for key in layer if key in table]
            if tensors and self._stays(tensors):
                self._packed.update(tensor.name for tensor in tensors)

    def decide_layers(self, names: TensorNames, spec: ModelSpec) -> None:
        """Decides for the attention of every layer."""
        for layer in range(spec.num_layers):
            self.decide(attention_table(names, spec, layer))

    def matrix(self, stored: Stored, tensors: ModelTensors) -> Weight:
        """Reads a matrix, packed if so decided."""
        is_packed = stored.name in self._packed
        return tensors.read_packed(stored) if is_packed else tensors.read(stored)

    def attention_weights(self, table: Table, tensors: ModelTensors) -> AttentionWeights:
        """Reads the weights of an `attention_table`."""
        return AttentionWeights(
            tensors={
                key: tensors.read(item) for key, item in table.items() if key not in LINEAR_KEYS
            },
            matrices={
                key: self.matrix(item, tensors) for key, item in table.items() if key in LINEAR_KEYS
            },
        )

    @property
    def description(self) -> str:
        """Describes the packed layers: "linear layers int8 packed, 8.12 bits"; "" if none is."""
        if not self._layouts:
            return ""
        names = dict.fromkeys(layout.name for layout in self._layouts)
        total = sum(count * layout.bits for layout, count in self._layouts.items())
        bits = total / self._layouts.total()
        return f"linear layers {' and '.join(names)} packed, {bits:.2f} bits"

    def _stays(self, tensors: Sequence[Stored]) -> bool:
        decided = self._decided(tensors)
        if not isinstance(decided, str):
            self._layouts[decided] += len(tensors)
            return True
        if decided in ("", _FLOATS):
            return False
        name = tensors[0].name
        if self.mode == "packed":
            raise ConfigError(
                f"model.linear_weights is 'packed', but {name} cannot stay packed: {decided}; "
                "use 'auto', or 'dequantised'."
            )
        if decided not in self.reasons:
            self.reasons.append(decided)
            _log.warning("linear layers are dequantised while loading: %s (%s)", decided, name)
        return False

    def _decided(self, tensors: Sequence[Stored]) -> PackedLayout | str:
        """Returns the layout, or the reason why the layer is held in floats: "" if that is
        requested."""
        can_pack = self.mode == "packed" or self.kernels.has_packed_linears
        if self.mode == "dequantised" or not can_pack:
            return ""
        forms = {self.reader.form(tensor.name, tensor.shape) for tensor in tensors}
        form = forms.pop()
        if forms:
            return "the queries, keys and values of a layer are stored in different ways"
        if form is None:
            return _FLOATS
        if form.is_transposed:
            return f"{form.name} of tensors with inputs before outputs"
        return self.kernels.linear_layout(form)


def weights_description(experts: ExpertPacking, linears: LinearPacking, dtype: torch.dtype) -> str:
    """Describes how the weights of a quantised checkpoint are held, and why some do not stay
    packed."""
    name = str(dtype).removeprefix("torch.")
    packed = [text for text in (experts.description, linears.description) if text]
    rest = f"{'the rest ' if packed else ''}dequantised to {name} while loading"
    reasons = dict.fromkeys((*experts.reasons, *linears.reasons))
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return "; ".join((*packed, rest + why))
