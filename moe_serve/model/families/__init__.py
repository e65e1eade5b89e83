"""The model families: one file each reads an architecture's config and tensor names."""

from __future__ import annotations

import difflib

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.families import (
    deepseek,
    dots1,
    ernie4_5_moe,
    exaone_moe,
    flint,
    glm,
    gpt_oss,
    granitemoe,
    hunyuan_v1_moe,
    hy_v3,
    llama4,
    mellum,
    minimax_m2,
    mistral4,
    mixtral,
    olmoe,
    qwen,
)
from moe_serve.model.families.config_parts import Family

FAMILIES: tuple[Family, ...] = (
    deepseek.DEEPSEEK_V2,
    deepseek.DEEPSEEK_V3,
    dots1.FAMILY,
    ernie4_5_moe.FAMILY,
    exaone_moe.FAMILY,
    flint.FAMILY,
    glm.GLM4_MOE,
    glm.GLM4V_MOE,
    glm.GLM4_MOE_LITE,
    gpt_oss.FAMILY,
    granitemoe.FAMILY,
    hunyuan_v1_moe.FAMILY,
    hy_v3.FAMILY,
    llama4.FAMILY,
    mellum.FAMILY,
    minimax_m2.FAMILY,
    mistral4.FAMILY,
    mixtral.FAMILY,
    olmoe.FAMILY,
    qwen.QWEN2_MOE,
    qwen.QWEN3_MOE,
    qwen.QWEN3_VL_MOE,
    glm.SOLAR_OPEN,
)

_REFUSED = {  # close relatives of served models, with the features that are not supported
    "DeepseekV32ForCausalLM": "sparse attention, whose indexer chooses the keys of each query",
    "DeepseekV4ForCausalLM": "compressed sparse attention and hyper-connections",
    "GlmMoeDsaForCausalLM": "sparse attention, whose indexer chooses the keys of each query",
    "LongcatFlashForCausalLM": "experts without weights and two attentions in a layer",
}


def family_of(config: HFConfig) -> Family:
    """Returns the family of the architecture. Raises CheckpointError for an unknown one."""
    architecture = config.architecture()
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    if architecture in _REFUSED:
        raise config.error(
            "architectures",
            f"is {architecture!r}, which is not served: it has {_REFUSED[architecture]}",
        )
    raise config.error(
        "architectures", f"is {architecture!r}, which is not served{_hint(architecture)}"
    )


def _hint(architecture: str) -> str:
    """Suggests the nearest name, if one is similar, and the page that lists all names, because a
    full list is too long.
    """

    def stem(name: str) -> str:
        """Returns the part of a name that distinguishes it, without `ForCausalLM`."""
        return name.partition("For")[0].lower()

    known = [name for family in FAMILIES for name in family.architectures]
    name_of = {stem(name): name for name in known}
    nearest = difflib.get_close_matches(stem(architecture), name_of, n=1, cutoff=0.8)
    hint = f"; the nearest served one: {name_of[nearest[0]]}" if nearest else ""
    return f"{hint}; docs/guide/models.md lists all {len(known)} served ones"


__all__ = ["FAMILIES", "Family", "family_of"]
