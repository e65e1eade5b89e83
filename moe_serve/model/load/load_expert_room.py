"""The expert stage of a rank whose experts may be exchanged for others while it serves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from experts.expert_stage import ExpertStage
from experts.layer_banks import LayerBanks
from experts.slot_room import SlotRoom
from moe_kernels.interface.kernels import Kernels
from moe_serve.errors import ConfigError
from moe_serve.model.load.load_experts import ExpertLoader
from moe_serve.model.spec import ModelSpec

_ANY_SIZE = 2**62  # bytes: the number of slots says how many


def room_stage(
    spec: ModelSpec,
    kernels: Kernels,
    experts: ExpertLoader,
    held: Sequence[Collection[int]],
    num_slots: int,
    device: torch.device,
    num_threads: int,
) -> ExpertStage:
    """`num_slots`: of all layers together. Raises ConfigError where experts are of several forms,
    as a slot fits only one."""
    layers = [layer for layer in range(spec.num_layers) if spec.layers[layer].is_sparse]
    if len(experts.forms_of(layers)) > 1:
        raise ConfigError(
            "cluster.rebalance needs experts that are held alike in all layers, and this "
            "checkpoint stores some in another way: set it to 'off', or model.expert_weights to "
            "'dequantised'."
        )
    sample, num_experts = experts.read(layers[0], 0), spec.router.num_experts
    room = SlotRoom(
        kernels.expert_slots(sample, spec.activation, _ANY_SIZE, num_slots), layers, num_experts
    )

    def load(layer: int) -> None:
        for expert in held[layer]:
            room.stage(layer, expert, experts.read(layer, expert))
            experts.drop(layer, expert)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(load, layers))
    room.switch({layer: held[layer] for layer in layers})
    banks: list[LayerBanks | None] = [None] * spec.num_layers
    for layer in layers:
        of_layer = banks[layer] = LayerBanks(num_experts, spec.width, device)
        of_layer.put_room(room.banks[layer], held[layer])
    return ExpertStage(banks, room=room)
