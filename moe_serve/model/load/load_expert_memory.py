"""Builds expert stages whose routed experts are not all at fixed places in memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from experts.expert_layer import LayerBanks
from experts.expert_stage import ExpertStage
from experts.memory.expert_memory import ExpertMemory
from experts.memory.memory_layer import MemoryLayer
from experts.memory.memory_policy import MemoryPolicy
from experts.slot_room import SlotRoom
from moe_kernels.interface.kernels import Kernels
from moe_serve.config.sections import MemoryPolicyName, ModelConfig
from moe_serve.errors import ConfigError
from moe_serve.model.load.load_experts import ExpertLoader
from moe_serve.model.spec import ModelSpec

_LEAST_SLOTS = 2  # one in use, and one that is being read into


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The bytes of packed routed experts that a process may hold, and the policy that chooses
    them.
    """

    num_bytes: int
    policy: MemoryPolicyName

    @classmethod
    def of(cls, config: ModelConfig) -> MemoryBudget | None:
        """Reads the budget from a config.

        Raises ConfigError for an invalid budget in a config built in code.
        """
        if config.expert_memory_bytes is None:
            return None
        if config.expert_memory_bytes < 1:
            raise ConfigError(
                f"model.expert_memory_bytes must be 1 or more, got {config.expert_memory_bytes}: "
                "give a positive number of bytes, or None to keep all experts in memory."
            )
        return cls(num_bytes=config.expert_memory_bytes, policy=config.expert_memory_policy)


def memory_stage(
    spec: ModelSpec,
    kernels: Kernels,
    experts: ExpertLoader,
    held: Sequence[Collection[int]],
    budget: MemoryBudget,
) -> ExpertStage:
    """Makes a stage that reads experts when needed. `experts` is called repeatedly, by two threads.

    Raises ConfigError if no expert fits.
    """
    layers = [layer for layer in range(spec.num_layers) if spec.layers[layer].is_sparse]
    if not layers:
        raise ConfigError(
            f"model.expert_memory_bytes is {budget.num_bytes}, but none of the {spec.num_layers} "
            "layers of this checkpoint has routed experts: leave it out."
        )
    if len(experts.forms_of(layers)) > 1:
        raise ConfigError(
            "model.expert_memory_bytes needs experts that have the same format in all layers, but "
            "this checkpoint stores some differently: leave it out, or set model.expert_weights to "
            "'dequantised'."
        )
    of_model = len(layers) * spec.router.num_experts
    sample = experts.read(layers[0], 0)
    slots = kernels.expert_slots(sample, spec.activation, budget.num_bytes, of_model)
    if slots.num_slots < _LEAST_SLOTS:
        size, num_held = slots.slot_bytes, sum(len(of_layer) for of_layer in held)
        raise ConfigError(
            f"model.expert_memory_bytes is {budget.num_bytes}, but an expert takes {size} bytes "
            f"and at least {_LEAST_SLOTS} must fit: give {_LEAST_SLOTS * size} or more, or "
            f"{num_held * size} for all {num_held} experts of this process."
        )
    memory = ExpertMemory(
        slots, experts.read, layers, spec.router.num_experts, MemoryPolicy.named(budget.policy)
    )
    sparse = set(layers)
    return ExpertStage(
        [
            MemoryLayer(memory, layer, held[layer]) if layer in sparse else None
            for layer in range(spec.num_layers)
        ],
        memory,
    )


_ANY_SIZE = 2**62  # bytes; the number of slots sets the limit


def room_stage(
    spec: ModelSpec,
    kernels: Kernels,
    experts: ExpertLoader,
    held: Sequence[Collection[int]],
    num_slots: int,
    device: torch.device,
    num_threads: int,
) -> ExpertStage:
    """Makes a stage whose experts can be exchanged for others while it serves.

    `num_slots`: the total of all layers. Raises ConfigError if experts have several forms, because
    a slot fits only one.
    """
    layers = [layer for layer in range(spec.num_layers) if spec.layers[layer].is_sparse]
    if len(experts.forms_of(layers)) > 1:
        raise ConfigError(
            "cluster.rebalance needs experts that have the same format in all layers, but this "
            "checkpoint stores some differently: set it to 'off', or model.expert_weights to "
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
