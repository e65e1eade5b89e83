"""Describes the layer that a checkpoint ships for predicting the token behind the next one (MTP).

It is one more decoder layer. Its input is a projection of two normed rows side by side: the
embedding of the next token, then the model's own state (DeepSeek-V3 report, section 2.2).
Checkpoints store it behind the last layer, or apart from the model. If there are several such
layers, the first is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.manifest import (
    Stored,
    Table,
    attention_table,
    feed_forward_table,
)
from moe_serve.model.checkpoint.tensor_names import TensorNames
from moe_serve.model.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPNames:
    """Names of the tensors before the layer, and of all others. `layer.final_norm` is the norm of
    its output. `layer.embedding` and `layer.head` may be copies of the model's own."""

    token_norm: str
    state_norm: str
    projection: str
    layer: TensorNames

    def after(self, prefix: str) -> MTPNames:
        """Returns the same names, each with `prefix` before it."""
        return MTPNames(
            token_norm=prefix + self.token_norm,
            state_norm=prefix + self.state_norm,
            projection=prefix + self.projection,
            layer=self.layer.after(prefix),
        )


@dataclass(frozen=True, slots=True)
class MTPLayer:
    """The layer: `spec` is the model's, but with this layer as the only one."""

    spec: ModelSpec
    names: MTPNames

    def after(self, prefix: str) -> MTPLayer:
        """Returns the same layer, each of whose names has `prefix` before it."""
        return MTPLayer(self.spec, self.names.after(prefix))

    def fusion_table(self) -> Table:
        """Returns the tensors before the layer, and the norm behind it."""
        names, d = self.names, self.spec.width
        return {
            "token_norm": Stored(names.token_norm, (d,)),
            "state_norm": Stored(names.state_norm, (d,)),
            "projection": Stored(names.projection, (d, 2 * d)),
            "final_norm": Stored(names.layer.final_norm, (d,)),
        }

    def tables(self) -> list[Table]:
        """Returns all tensors but the routed experts, and the embedding and head that it shares."""
        names, spec = self.names.layer, self.spec
        layer = attention_table(names, spec, 0), feed_forward_table(names, spec, 0)
        return [self.fusion_table(), *layer]


# Reads the layer of a checkpoint from its config; the model's names and spec are read already.
ReadMTP = Callable[[HFConfig, TensorNames, ModelSpec], MTPLayer]


def mtp_behind_last_layer(config: HFConfig, names: TensorNames, spec: ModelSpec) -> MTPLayer:
    """Reads DeepSeek-V3's and GLM's: a sparse layer, numbered like one more of the model's."""
    root = f"model.layers.{spec.num_layers}."
    layer = replace(
        names.for_layer(root),
        embedding=root + "embed_tokens.weight",
        head=root + "shared_head.head.weight",
        final_norm=root + "shared_head.norm.weight",
    )
    return MTPLayer(
        _only(spec, replace(spec.layers[-1], is_sparse=True)),
        MTPNames(
            token_norm=root + "enorm.weight",
            state_norm=root + "hnorm.weight",
            projection=root + "eh_proj.weight",
            layer=layer,
        ),
    )


def mtp_apart(names: TensorNames, spec: ModelSpec, layer: LayerSpec) -> MTPLayer:
    """Returns a layer that is stored as `mtp.`, and uses the model's own embedding and head."""
    return MTPLayer(
        _only(spec, layer),
        MTPNames(
            token_norm="mtp.pre_fc_norm_embedding.weight",
            state_norm="mtp.pre_fc_norm_hidden.weight",
            projection="mtp.fc.weight",
            layer=replace(names.for_layer("mtp.layers.0."), final_norm="mtp.norm.weight"),
        ),
    )


def first_mtp_kind(config: HFConfig, key: str, known: tuple[str, ...], default: str) -> str:
    """Returns the kind of the first layer in a list of the config; `default` without a list."""
    kinds = config.get(key)
    if kinds is None:
        return default
    if not isinstance(kinds, list) or not kinds or kinds[0] not in known:
        raise config.error(key, f"must be a list of {' or '.join(known)}, is {kinds!r}")
    kind: str = kinds[0]
    return kind


def _only(spec: ModelSpec, layer: LayerSpec) -> ModelSpec:
    return replace(spec, layers=(layer,))
