"""The tensor names of a checkpoint. `{layer}` and `{expert}` are placeholders."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

_LAYER = "model.layers.{layer}."
_MLP = _LAYER + "mlp."


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPNames:
    """Names of one MLP: a shared expert or a dense layer.

    `gate_up`: both in one tensor, gate rows first.
    """

    gate: str = ""
    up: str = ""
    down: str
    gate_up: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of a layer's routed experts, in one of the layouts that checkpoints use.

    Separate: `gate`, `up` [F, D] and `down` [D, F] per expert, with `{expert}` in the name. Fused:
    `gate_up` [E, 2 F, D] and `down` [E, D, F], or with the last two dimensions swapped
    (`is_transposed`); gate and up are halves, or alternate (`is_interleaved`). Biases, if the spec
    has them, are `gate_up_bias` [E, 2 F] and `down_bias` [E, D].
    """

    gate: str = ""
    up: str = ""
    down: str
    gate_up: str = ""
    gate_up_bias: str = ""
    down_bias: str = ""
    is_transposed: bool = False
    is_interleaved: bool = False


def mlp_names(prefix: str) -> MLPNames:
    """Returns `prefix` + gate_proj, up_proj, down_proj."""
    return MLPNames(
        gate=prefix + "gate_proj.weight",
        up=prefix + "up_proj.weight",
        down=prefix + "down_proj.weight",
    )


def separate_experts(prefix: str) -> ExpertNames:
    """Returns names of separate experts, under `prefix` + `{expert}.`."""
    return ExpertNames(
        gate=prefix + "{expert}.gate_proj.weight",
        up=prefix + "{expert}.up_proj.weight",
        down=prefix + "{expert}.down_proj.weight",
    )


_SEPARATE = separate_experts(_MLP + "experts.")
_FUSED = ExpertNames(gate_up=_MLP + "experts.gate_up_proj", down=_MLP + "experts.down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of all tensors. The defaults are the common Llama-like names; a family overrides some.

    `experts`: the layouts that the family's checkpoints use; the first one found is read.
    """

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    attention_norm: str = _LAYER + "input_layernorm.weight"
    moe_norm: str = _LAYER + "post_attention_layernorm.weight"
    q: str = _LAYER + "self_attn.q_proj.weight"
    k: str = _LAYER + "self_attn.k_proj.weight"
    v: str = _LAYER + "self_attn.v_proj.weight"
    o: str = _LAYER + "self_attn.o_proj.weight"
    q_norm: str = _LAYER + "self_attn.q_norm.weight"
    k_norm: str = _LAYER + "self_attn.k_norm.weight"
    sinks: str = _LAYER + "self_attn.sinks"
    # Latent attention: the query's latent, its norm and its up-projection; keys and values
    # likewise.
    q_a: str = _LAYER + "self_attn.q_a_proj.weight"
    q_a_norm: str = _LAYER + "self_attn.q_a_layernorm.weight"
    q_b: str = _LAYER + "self_attn.q_b_proj.weight"
    kv_a: str = _LAYER + "self_attn.kv_a_proj_with_mqa.weight"
    kv_a_norm: str = _LAYER + "self_attn.kv_a_layernorm.weight"
    kv_b: str = _LAYER + "self_attn.kv_b_proj.weight"
    router: str = _MLP + "gate.weight"
    router_bias: str = _MLP + "gate.bias"
    selection_bias: str = _MLP + "gate.e_score_correction_bias"
    shared: MLPNames = field(default_factory=lambda: mlp_names(_MLP + "shared_experts."))
    shared_gate: str = _MLP + "shared_expert_gate.weight"
    dense: MLPNames = field(default_factory=lambda: mlp_names(_MLP))
    experts: tuple[ExpertNames, ...] = (_SEPARATE, _FUSED)

    def after(self, prefix: str) -> TensorNames:
        """Returns the same names, each with `prefix` before it."""
        return _each(self, lambda name: prefix + name) if prefix else self

    def under(self, root: str) -> TensorNames:
        """Returns the same names with `root` in place of a leading "model."; the head's name has
        none.
        """
        return _each(self, lambda name: re.sub(r"^model\.", root, name))

    def for_layer(self, root: str) -> TensorNames:
        """Returns the same names for a single layer whose tensors begin with `root`."""
        return _each(self, lambda name: name.replace(_LAYER, root))


_Names = TypeVar("_Names", TensorNames, MLPNames, ExpertNames)


def _each(names: _Names, rename: Callable[[str], str]) -> _Names:
    changed: dict[str, Any] = {}
    for item in fields(names):
        value = getattr(names, item.name)
        if isinstance(value, MLPNames):
            changed[item.name] = _each(value, rename)
        elif isinstance(value, tuple):
            changed[item.name] = tuple(_each(part, rename) for part in value)
        elif isinstance(value, str) and value:
            changed[item.name] = rename(value)
    return replace(names, **changed)


def bias_of(weight_name: str) -> str:
    """Converts `...q_proj.weight` to `...q_proj.bias`."""
    return weight_name.removesuffix("weight") + "bias"
