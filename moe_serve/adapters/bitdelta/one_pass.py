"""Prepares BitDelta adapters for steps in which their rows pass the layers with all other rows.

Kernels with `layer_front` and `layer_stack` compute the base model's products for all rows at once,
and apply the additions and replacements of each fine-tune row by row. These calls do not support
latent attention, multipliers of the residual stream and shards. There the rows of a fine-tune pass
the layers separately, through its own attention stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from moe_kernels.interface.adapters import AdapterKernels, LayerTune, ModelTune
from moe_serve.model.stage.adapter_rows import AdapterLayer
from moe_serve.model.stage.attention import GroupedQueryAttention
from moe_serve.model.stage.attention_stage import AttentionLayer, AttentionStage
from moe_serve.model.stage.gather import GatheredMLP

_T = TypeVar("_T")


def with_mlps(layers: Sequence[AdapterLayer], stage: AttentionStage) -> tuple[AdapterLayer, ...]:
    """Adds the shared experts and dense MLPs of a fine-tune's stage to its layers."""
    return tuple(_with_mlp(*pair) for pair in zip(layers, stage.layers, strict=True))


def _with_mlp(layer: AdapterLayer, weights: AttentionLayer) -> AdapterLayer:
    if weights.mlp is None or isinstance(weights.mlp.bank, GatheredMLP):
        return layer
    return replace(layer, mlp=weights.mlp.bank, gate=weights.mlp.gate)


def prepare(
    kernels: AdapterKernels | None,
    base: AttentionStage,
    own: AttentionStage,
    layers: Sequence[AdapterLayer],
) -> Any | None:
    """Returns a fine-tune in the form of the kernels; None: its rows pass the layers separately.
    `layers`: those of `with_mlps`, whose MLPs may be the base model's."""
    if kernels is None or not base.has_all_fronts:
        return None
    parts = [
        replace(
            layer.parts,
            mlp=layer.mlp if _has_own_mlp(*pair) else None,
            tune=_layer_tune(*pair),
        )
        for layer, *pair in zip(layers, base.layers, own.layers, strict=True)
    ]
    model = ModelTune(
        embedding_VD=_changed(own.embedding, base.embedding),
        final_norm_D=_changed(own.final_norm, base.final_norm),
        head=_changed(own.head, base.head),
    )
    return kernels.adapter(parts, model)


def _changed(own: _T, base: _T) -> _T | None:
    """Returns a part of a fine-tune; None: it is the same as in the base model."""
    return None if own is base else own


def _has_own_mlp(base: AttentionLayer, own: AttentionLayer) -> bool:
    return base.mlp is not None and own.mlp is not None and own.mlp.bank is not base.mlp.bank


def _layer_tune(base: AttentionLayer, own: AttentionLayer) -> LayerTune:
    heads, tuned = base.attention, own.attention
    assert isinstance(heads, GroupedQueryAttention) and isinstance(tuned, GroupedQueryAttention)
    norm = _changed(tuned.qk_norm, heads.qk_norm)
    router = _changed(own.router, base.router)
    return LayerTune(
        qkv=_changed(tuned.qkv, heads.qkv),
        output=_changed(own.output, base.output),
        attention_norm_D=_changed(own.attention_norm, base.attention_norm),
        moe_norm_D=_changed(own.moe_norm, base.moe_norm),
        q_norm=None if norm is None else norm.q,
        k_norm=None if norm is None else norm.k,
        sinks_H=_changed(tuned.sinks_H, heads.sinks_H),
        router=None if router is None else router.linear,
        selection_bias_E=None if router is None else router.selection_bias_E,
    )
