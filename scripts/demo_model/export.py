"""Exports a training checkpoint as a folder that moe-serve and other engines can load: JSON files
and chat template in Hugging Face layout, tensors under its names, and the model card.

Stacked experts [E, ...] become one tensor per expert; the tied head is not stored.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .corpus import END_OF_TEXT_ID, IM_END_ID, SPECIAL_TOKENS
from .network import Network, Shape
from .training import Recipe

# Renders as corpus.render_chat does; system messages have the same form. With tools, these are
# listed in the system message, which the model has never seen in training.
CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
_TOP = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}
_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "attention.q": "self_attn.q_proj.weight",
    "attention.k": "self_attn.k_proj.weight",
    "attention.v": "self_attn.v_proj.weight",
    "attention.o": "self_attn.o_proj.weight",
    "attention.q_norm": "self_attn.q_norm.weight",
    "attention.k_norm": "self_attn.k_norm.weight",
    "moe_norm": "post_attention_layernorm.weight",
    "moe.router": "mlp.gate.weight",
}
_EXPERT = {"moe.gate": "gate_proj", "moe.up": "up_proj", "moe.down": "down_proj"}


def model_config(shape: Shape, balance_weight: float) -> dict[str, object]:
    """Returns `config.json`. It has the rotary settings twice, because transformers 5 reads
    `rope_parameters`."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "intermediate_size": shape.top_k * shape.expert_width,  # of dense layers; there are none
        "moe_intermediate_size": shape.expert_width,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": balance_weight,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.max_positions,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.num_layers,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": IM_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
    }


def generation_config() -> dict[str, object]:
    """Returns the generation settings: a chat ends at <|im_end|>, a plain text at <|endoftext|>."""
    return {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "eos_token_id": [IM_END_ID, END_OF_TEXT_ID],
        "pad_token_id": END_OF_TEXT_ID,
    }


def tokenizer_config(shape: Shape) -> dict[str, object]:
    """Returns the tokenizer's settings: nothing is added around a text, and special tokens are
    never split."""
    end_of_text, _, im_end = SPECIAL_TOKENS
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_positions,
        "bos_token": None,
        "eos_token": im_end,
        "pad_token": end_of_text,
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(i): _special(t) for i, t in enumerate(SPECIAL_TOKENS)},
    }


def _special(content: str) -> dict[str, object]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, "special": True, **flags}


def hf_names(name: str, num_experts: int) -> list[str]:
    """Returns the Hugging Face name of `name`; for stacked experts, one name per expert in order.

    `layers.2.moe.up` -> `model.layers.2.mlp.experts.0.up_proj.weight`, `...experts.1.up_proj...`.
    """
    if name in _TOP:
        return [_TOP[name]]
    _, layer, rest = name.split(".", 2)
    if rest in _EXPERT:
        prefix = f"model.layers.{layer}.mlp.experts"
        return [f"{prefix}.{e}.{_EXPERT[rest]}.weight" for e in range(num_experts)]
    return [f"model.layers.{layer}.{_LAYER[rest]}"]


def to_hf(weights: dict[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    """Converts our fp32 weights to Hugging Face tensors in bf16."""
    tensors = {}
    for name, weight in weights.items():
        names = hf_names(name, num_experts)
        parts = weight.unbind(0) if len(names) > 1 else (weight,)
        for hf_name, part in zip(names, parts, strict=True):
            tensors[hf_name] = part.to(torch.bfloat16).contiguous()
    return tensors


def from_hf(tensors: dict[str, Tensor], names: list[str], num_experts: int) -> dict[str, Tensor]:
    """Inverts `to_hf` for our parameters `names`, in fp32 (bf16 values are kept exactly)."""
    weights = {}
    for name in names:
        parts = [tensors[hf_name].float() for hf_name in hf_names(name, num_experts)]
        weights[name] = torch.stack(parts) if len(parts) > 1 else parts[0]
    return weights


_SOURCES = Path(__file__).with_name("sources.md")
_TEMPLATE = Path(__file__).with_name("model_card_template.md")


def model_card(shape: Shape, *, num_steps: int, train_seconds: float) -> str:
    """Returns the README.md of the exported folder."""
    total, active = num_parameters(shape)
    sizes = {name: getattr(shape, name) for name in shape.__dataclass_fields__}
    return _TEMPLATE.read_text(encoding="utf-8").format(
        **sizes,
        params_m=total / 1e6,
        active_m=active / 1e6,
        num_steps=num_steps,
        train_minutes=train_seconds / 60,
        sources=_SOURCES.read_text(encoding="utf-8"),
    )


def num_parameters(shape: Shape) -> tuple[int, int]:
    """Returns the number of all parameters, and of those that one token uses (the tied head counts
    once)."""
    expert = 3 * shape.expert_width * shape.width
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim * shape.width
    norms = 2 * shape.width + 2 * shape.head_dim
    layer = attention + norms + shape.num_experts * shape.width
    dense = shape.vocab_size * shape.width + shape.width + shape.num_layers * layer
    all_experts = shape.num_layers * shape.num_experts * expert
    return dense + all_experts, dense + shape.num_layers * shape.top_k * expert


MAX_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """A training checkpoint without its optimizer state."""

    weights: dict[str, Tensor]  # fp32, our names
    num_steps: int
    train_seconds: float

    @classmethod
    def read(cls, work: Path) -> TrainedWeights:
        """Reads `work/checkpoint.safetensors` without the optimizer's moments."""
        with safe_open(work / "checkpoint.safetensors", "pt") as file:
            names = [key for key in file.keys() if key.startswith("weight.")]  # noqa: SIM118
            weights = {key.removeprefix("weight."): file.get_tensor(key) for key in names}
            num_steps = int(file.get_tensor("optimizer.steps"))
            return cls(weights, num_steps, float(file.metadata()["spent"]))


def export(work: Path, folder: Path, shape: Shape, recipe: Recipe) -> int:
    """Writes the folder and returns its size in bytes. Raises ValueError above MAX_BYTES."""
    trained = TrainedWeights.read(work)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = to_hf(trained.weights, shape.num_experts)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    shutil.copyfile(work / "tokenizer.json", folder / "tokenizer.json")
    _write_json(folder / "config.json", model_config(shape, recipe.balance_weight))
    _write_json(folder / "generation_config.json", generation_config())
    _write_json(folder / "tokenizer_config.json", tokenizer_config(shape))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    card = model_card(shape, num_steps=trained.num_steps, train_seconds=trained.train_seconds)
    (folder / "README.md").write_text(card, encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > MAX_BYTES:
        raise ValueError(f"{folder} holds {size} bytes; the limit is {MAX_BYTES}.")
    return size


def load_exported(folder: Path, shape: Shape) -> Network:
    """Loads the exported bf16 weights into the network that was trained."""
    network = Network(shape)
    tensors = load_file(folder / "model.safetensors")
    names = [name for name, _ in network.named_parameters()]
    network.load_state_dict(from_hf(tensors, names, shape.num_experts))
    return network.eval()


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
