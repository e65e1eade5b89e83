"""Mistral-Small-4: latent attention whose queries grow with the position, softmax router.

It comes as a model of its own, or as the text model beside a vision tower.
"""

from __future__ import annotations

from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import rope_values
from moe_serve.model.families.config_parts import (
    Family,
    expert_groups,
    router_numbers,
    sparse_layers,
)
from moe_serve.model.families.latent import latent_decoder
from moe_serve.model.spec import ModelSpec, QueryTemperature, RouterSpec


def _read_spec(config: HFConfig) -> ModelSpec:
    config.require("model_type", "mistral4", default="mistral4")
    return latent_decoder(
        config,
        family="mistral4",
        router=RouterSpec(
            shape=RouterShape(
                **router_numbers(config, scaling=1.0),
                is_renormalised=bool(config.get("norm_topk_prob", True)),
                renorm_floor=1e-20,
                group_score="top2",
                **expert_groups(config),
            )
        ),
        is_sparse=sparse_layers(config),
        query_temperature=_query_temperature(config),
    )


def _query_temperature(config: HFConfig) -> QueryTemperature | None:
    """Reads the query temperature: 1 + beta * ln(1 + floor(position / original context))."""
    rope = rope_values(config)
    beta = rope.get("llama_4_scaling_beta")
    if not beta:
        return None
    original = rope.get("original_max_position_embeddings")
    if not isinstance(original, int) or original < 1:
        raise config.error(
            "rope_parameters.original_max_position_embeddings",
            f"must be a positive integer, is {original!r}",
        )
    if not isinstance(beta, int | float):
        raise config.error("rope_parameters.llama_4_scaling_beta", f"must be a number, is {beta!r}")
    return QueryTemperature(scale=float(beta), floor_scale=float(original), shift=0)


FAMILY = Family(
    name="mistral4",
    architectures=("Mistral4ForCausalLM", "Mistral3ForConditionalGeneration"),
    read_spec=_read_spec,
    prefixes=("", "language_model.", "model.language_model."),
)
