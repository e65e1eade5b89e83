"""Builds the parts of an epoch that a rank needs: data group, frame layout, wire format, row
split."""

from __future__ import annotations

from typing import Any

import torch

from moe_serve.cluster.control.messages import Configure, Join
from moe_serve.engine.execute.next_layer_prediction import num_foreseen
from moe_serve.model.spec import ModelSpec
from moe_serve.pipeline.exchange.frame_layout import CompactLayout, FrameLayout, MaskedLayout
from moe_serve.pipeline.exchange.row_split import RowSplit
from moe_serve.pipeline.frames.wire import WireFormat, make_wire_format
from moe_serve.pipeline.links.data_group import DataGroup


def meet(
    join: Join, me: str, store: Any, configure: Configure, host: str, device: torch.device
) -> DataGroup:
    """Joins the data group of an epoch; raises PeerLostError unless all members come."""
    is_expert = me in join.expert_ranks
    return DataGroup(
        [*join.attention_ranks, *join.expert_ranks],
        me,
        join.attention_ranks if is_expert else join.expert_ranks,
        store,
        epoch=join.epoch,
        host=host,
        timeout_s=configure.config.cluster.timeout_s,
        device=device,
        transport=configure.config.cluster.transport,
    )


def layout_of(group: DataGroup, device: torch.device) -> FrameLayout:
    """Returns the frame layout of the epoch. NCCL needs fixed sizes in the device's memory."""
    return MaskedLayout(device) if group.is_nccl else CompactLayout(device)


def wire_of(join: Join, configure: Configure, spec: ModelSpec, dtype: torch.dtype) -> WireFormat:
    return make_wire_format(
        spec.width,
        spec.router.top_k,
        dtype,
        len(join.expert_ranks),
        configure.config.cluster.wire_dtype,
        num_foreseen(configure.config, spec),
    )


def split_of(join: Join, configure: Configure, device: torch.device) -> RowSplit:
    config = configure.config
    return RowSplit(
        join.ranks_of,
        len(join.expert_ranks),
        device,
        config.cluster.replica_choice,
        has_adapters=config.adapters.is_enabled,
    )


def sparse_layers(spec: ModelSpec) -> list[int]:
    """Returns the layers that have routed experts."""
    return [index for index, layer in enumerate(spec.layers) if layer.is_sparse]
