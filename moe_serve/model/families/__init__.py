"""The model families: architecture name -> how to read its config and its tensors."""

from __future__ import annotations

from moe_serve.model.families import (
    gpt_oss,
    granitemoe,
    llama4,
    mixtral,
    olmoe,
    qwen3_moe,
    qwen3_vl_moe,
)
from moe_serve.model.families.family import Family
from moe_serve.model.hf_config import HFConfig

FAMILIES: tuple[Family, ...] = (
    gpt_oss.FAMILY,
    granitemoe.FAMILY,
    llama4.FAMILY,
    mixtral.FAMILY,
    olmoe.FAMILY,
    qwen3_moe.FAMILY,
    qwen3_vl_moe.FAMILY,
)


def family_of(config: HFConfig) -> Family:
    """The family that serves the architecture; CheckpointError with those there are, if none."""
    architecture = config.architecture()
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.architectures))
    raise config.error(
        "architectures", f"is {architecture!r}, which is not served; served: {known}"
    )


__all__ = ["FAMILIES", "Family", "family_of"]
