"""Prepares BitDelta adapters for steps in which their rows pass the layers with all other rows.

Kernels with `AdapterKernels.rows` compute the base model's products for all rows at once, and apply
the additions and replacements of each fine-tune row by row: inside `layer_front` and `layer_stack`,
or part by part for layers that these do not support (latent attention, multipliers of the residual
stream, and shards). With other kernels, the rows of a fine-tune pass its own attention stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from moe_kernels.interface.adapters import AdapterKernels, LayerTune, ModelTune
from moe_kernels.interface.kernels import Linear
from moe_kernels.interface.signed_kernels import SignedBank
from moe_serve.model.stage.adapter_rows import AdapterLayer
from moe_serve.model.stage.attention import Attention, GroupedQueryAttention, LatentAttention
from moe_serve.model.stage.attention_stage import AttentionLayer, AttentionStage
from moe_serve.model.stage.gather import GatheredAttention, GatheredHead, GatheredMLP

_T = TypeVar("_T")


def with_mlps(
    layers: Sequence[AdapterLayer], base: AttentionStage, own: AttentionStage
) -> tuple[AdapterLayer, ...]:
    """Adds the shared experts and dense MLPs of a fine-tune's stage to its layers."""
    return tuple(_with_mlp(*each) for each in zip(layers, base.layers, own.layers, strict=True))


def _with_mlp(layer: AdapterLayer, base: AttentionLayer, own: AttentionLayer) -> AdapterLayer:
    if base.mlp is None or own.mlp is None or isinstance(own.mlp.bank, GatheredMLP):
        return layer
    bank, has_own_gate = own.mlp.bank, own.mlp.gate is not base.mlp.gate
    if has_own_gate or (isinstance(bank, SignedBank) and bank.base is not base.mlp.bank):
        return replace(layer, mlp=bank, gate=own.mlp.gate)
    return replace(layer, mlp_additions=bank.signs) if isinstance(bank, SignedBank) else layer


def prepare(
    kernels: AdapterKernels,
    base: AttentionStage,
    own: AttentionStage,
    layers: Sequence[AdapterLayer],
) -> Any | None:
    """Returns a fine-tune in the form of the kernels; None: its rows pass its own stage.
    `layers`: those of `with_mlps`, whose MLPs may be the base model's."""
    parts = [
        replace(
            layer.parts,
            mlp=layer.mlp if _has_own_mlp(*pair) else None,
            tune=_layer_tune(*pair),
        )
        for layer, *pair in zip(layers, base.layers, own.layers, strict=True)
    ]
    if isinstance(base.head, GatheredHead):  # of a shard, which has no call for all layers
        return kernels.adapter(parts)
    model = ModelTune(
        embedding_VD=_changed(own.embedding, base.embedding),
        final_norm_D=_changed(own.final_norm, base.final_norm),
        head=_changed(own.head, base.head),
    )
    return kernels.adapter(parts, model)


def _changed(own: _T, base: _T) -> _T | None:
    """Returns a part of a fine-tune; None: it is the same as in the base model."""
    return None if own is base else own


def _all_changed(own: Mapping[str, _T | None], base: Mapping[str, object]) -> Mapping[str, _T]:
    """Returns the parts of a fine-tune that differ from the base model's."""
    return {k: part for k, part in own.items() if part is not None and part is not base[k]}


def _has_own_mlp(base: AttentionLayer, own: AttentionLayer) -> bool:
    return base.mlp is not None and own.mlp is not None and own.mlp.bank is not base.mlp.bank


def _layer_tune(base: AttentionLayer, own: AttentionLayer) -> LayerTune:
    heads, tuned, ups = _heads(base), _heads(own), dict[str, Any]()
    router = _changed(own.router, base.router)
    if isinstance(tuned, GroupedQueryAttention) and isinstance(heads, GroupedQueryAttention):
        norm = _changed(tuned.qk_norm, heads.qk_norm)
        q_norm, k_norm = (None, None) if norm is None else (norm.q, norm.k)
        sinks_H = _changed(tuned.sinks_H, heads.sinks_H)
    else:
        assert isinstance(tuned, LatentAttention) and isinstance(heads, LatentAttention)
        q_norm, k_norm, sinks_H = _changed(tuned.latent_norm, heads.latent_norm), None, None
        if tuned.key_up is not heads.key_up:
            ups = {"key_up": tuned.key_up, "value_up": tuned.value_up}
    return LayerTune(
        signs=_all_changed(_linears(own), _linears(base)),
        norms=_all_changed(_norms(own), _norms(base)),
        q_norm=q_norm,
        k_norm=k_norm,
        sinks_H=sinks_H,
        heads=ups,
        router=None if router is None else router.linear,
        selection_bias_E=None if router is None else router.selection_bias_E,
    )


def _heads(layer: AttentionLayer) -> Attention:
    """Returns the attention of a layer, or the part of it that a shard has."""
    attention = layer.attention
    return attention.part if isinstance(attention, GatheredAttention) else attention


def _linears(layer: AttentionLayer) -> Mapping[str, Linear | None]:
    heads = _heads(layer)
    if isinstance(heads, GroupedQueryAttention):
        return {"qkv": heads.qkv, "output": layer.output}
    assert isinstance(heads, LatentAttention), f"{type(heads).__name__} has no signs"
    return {
        "query_down": heads.query_down,
        "query": heads.query,
        "latent": heads.latent,
        "output": layer.output,
    }


def _norms(layer: AttentionLayer) -> Mapping[str, Tensor | None]:
    heads = _heads(layer)
    query = heads.query_norm if isinstance(heads, LatentAttention) else None
    return {"attention": layer.attention_norm, "moe": layer.moe_norm, "query": query}
