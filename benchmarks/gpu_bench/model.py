"""The measured models: a config.json in a folder, and the sizes derived from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.model_size import ModelSize
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.manifest import all_tensors
from moe_serve.model.families import family_of
from moe_serve.model.spec import ModelSpec

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "models"
# A Qwen3-MoE that runs anywhere; widths are whole groups of every packed format.
_TINY = {
    "hidden_size": 128,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}


def model_names() -> list[str]:
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def write_model(folder: Path, name: str, *, is_tiny: bool) -> None:
    """Writes the config of `configs/models/`; with tiny sizes on request (only Qwen3-MoE)."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    if is_tiny:
        if config["model_type"] != "qwen3_moe":
            raise SystemExit(f"--tiny has sizes for Qwen3-MoE only, and {name} is another family.")
        config |= _TINY
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def read_spec(folder: Path) -> ModelSpec:
    config = HFConfig.read(folder)
    return family_of(config).read_spec(config.text())


def stored_weights(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns every tensor of a checkpoint with this config, experts in the family's first
    layout.
    """
    config = HFConfig.read(folder)
    family = family_of(config)
    names = family.names_in(lambda _: True)
    stored = all_tensors(names, names.experts[0], family.read_spec(config.text()))
    return {item.name: item.shape for item in stored}


def model_size(folder: Path, dtype: str, expert_bits: float | None = None) -> ModelSize:
    """Counts the parameters that a token touches; `expert_bits` is the size of a packed expert
    weight.
    """
    spec = read_spec(folder)
    counts = {"expert": 0, "dense": 0, "head": 0, "embedding": 0}
    for name, shape in stored_weights(folder).items():
        size = 1
        for length in shape:
            size *= length
        counts[_kind(name)] += size
    if spec.is_head_tied:
        counts["head"], counts["embedding"] = counts["embedding"], 0
    attention = spec.layers[0].attention
    return ModelSize(
        num_layers=spec.num_layers,
        num_experts=spec.router.num_experts,
        top_k=spec.router.top_k,
        expert=counts["expert"] // (spec.num_layers * spec.router.num_experts),
        dense=counts["dense"],
        head=counts["head"],
        embedding=counts["embedding"],
        kv_width=spec.kv_values_per_token,
        attention_width=attention.num_heads * attention.head_dim,
        dtype=dtype,
        expert_bits=expert_bits,
    )


def _kind(name: str) -> str:
    if ".experts." in name:
        return "expert"
    if "lm_head." in name:
        return "head"
    return "embedding" if "embed_tokens" in name else "dense"
