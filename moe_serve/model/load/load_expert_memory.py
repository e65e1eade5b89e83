"""The expert stage of a model whose routed experts need not all be in memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from experts.expert_stage import ExpertStage
from experts.memory.expert_memory import ExpertMemory
from experts.memory.memory_layer import MemoryLayer
from experts.memory.policy import MemoryPolicy
from moe_kernels.interface.kernels import Kernels
from moe_serve.config.sections import MemoryPolicyName, ModelConfig
from moe_serve.errors import ConfigError
from moe_serve.model.load.load_experts import ExpertLoader
from moe_serve.model.spec import ModelSpec

_LEAST_SLOTS = 2  # one in use, and one that is being read into


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """How many bytes of packed routed experts a process may hold, and how they are chosen."""

    num_bytes: int
    policy: MemoryPolicyName

    @classmethod
    def of(cls, config: ModelConfig) -> MemoryBudget | None:
        """Raises ConfigError for what is no budget, in a config that was built in code."""
        if config.expert_memory_bytes is None:
            return None
        if config.expert_memory_bytes < 1:
            raise ConfigError(
                f"model.expert_memory_bytes is {config.expert_memory_bytes}: give a positive "
                "number of bytes, or None to keep all experts in memory."
            )
        return cls(num_bytes=config.expert_memory_bytes, policy=config.expert_memory_policy)


def memory_stage(
    spec: ModelSpec,
    kernels: Kernels,
    experts: ExpertLoader,
    held: Sequence[Collection[int]],
    budget: MemoryBudget,
) -> ExpertStage:
    """`experts` is asked again and again, by two threads. Raises ConfigError if nothing fits."""
    layers = [layer for layer in range(spec.num_layers) if spec.layers[layer].is_sparse]
    if not layers:
        raise ConfigError(
            f"model.expert_memory_bytes is {budget.num_bytes}, but none of the {spec.num_layers} "
            "layers of this checkpoint has routed experts: leave it out."
        )
    if len(experts.forms_of(layers)) > 1:
        raise ConfigError(
            "model.expert_memory_bytes needs experts that are held alike in all layers, and this "
            "checkpoint stores some in another way: leave it out, or set model.expert_weights to "
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
