"""Writes a random MoE checkpoint in Hugging Face layout: sharded safetensors with an index.

    python scripts/make_random_model.py build/random-1b
    python scripts/make_random_model.py build/tiny --family mixtral --num-layers 2 --width 64

The defaults make a Qwen3-MoE of 1.26 B parameters in bf16. The same flags and seed give the same
files.

The tensors are created and written shard by shard; one shard is in memory at a time. D model width,
F expert width, E experts, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a model; the defaults make a Qwen3-MoE of 1.26 B parameters."""

    num_layers: int = 16
    width: int = 1024
    num_heads: int = 16
    num_kv_heads: int = 4
    head_dim: int = 64
    num_experts: int = 32
    top_k: int = 4
    expert_width: int = 768
    vocab_size: int = 4096
    max_positions: int = 4096
    is_tied: bool = False


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to create. `std` None means ones (a norm's weight)."""

    name: str
    shape: tuple[int, ...]
    std: float | None


@dataclass(frozen=True, slots=True)
class Family:
    """The names that one family uses."""

    architecture: str
    moe: str  # the MoE block inside a layer
    expert_parts: tuple[str, str, str]  # gate, up, down
    norm_widths: Callable[[Sizes], tuple[int, int] | None]  # of q_norm and k_norm
    config: Callable[[Sizes], dict[str, object]]

    def check(self, sizes: Sizes) -> None:
        """Raises ValueError if the family cannot have these sizes."""
        if self is FAMILIES["olmoe"] and sizes.num_heads * sizes.head_dim != sizes.width:
            raise ValueError(
                f"olmoe has heads of width / num_heads ({sizes.width} / {sizes.num_heads}), "
                f"got {sizes.head_dim}; set --head-dim or --num-heads."
            )


FAMILIES = {
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
        lambda s: (s.head_dim, s.head_dim),
        lambda s: {
            "num_experts": s.num_experts,
            "moe_intermediate_size": s.expert_width,
            "intermediate_size": s.top_k * s.expert_width,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "head_dim": s.head_dim,
            "attention_bias": False,
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "block_sparse_moe",
        ("w1", "w3", "w2"),
        lambda s: None,
        lambda s: {
            "num_local_experts": s.num_experts,
            "intermediate_size": s.expert_width,
            "head_dim": s.head_dim,
            "sliding_window": None,
        },
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
        lambda s: (s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim),
        lambda s: {
            "num_experts": s.num_experts,
            "intermediate_size": s.expert_width,
            "norm_topk_prob": False,
            "clip_qkv": None,
            "attention_bias": False,
        },
    ),
}


def model_config(family: str, sizes: Sizes, dtype: str) -> dict[str, object]:
    """Returns config.json; it has the rotary base twice, for transformers 4 and 5."""
    return {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "num_experts_per_tok": sizes.top_k,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "max_position_embeddings": sizes.max_positions,
        "tie_word_embeddings": sizes.is_tied,
        "output_router_logits": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": dtype,
        **FAMILIES[family].config(sizes),
    }


def tensor_specs(family: str, sizes: Sizes) -> Iterator[TensorSpec]:
    """Yields all tensors in file order. Scales keep activations and logits near 1 at any depth."""
    d = sizes.width
    yield TensorSpec(
        "model.embed_tokens.weight", (sizes.vocab_size, d), d**-0.5 if sizes.is_tied else 1.0
    )
    for layer in range(sizes.num_layers):
        yield from _layer(FAMILIES[family], f"model.layers.{layer}", sizes)
    yield TensorSpec("model.norm.weight", (d,), None)
    if not sizes.is_tied:
        yield TensorSpec("lm_head.weight", (sizes.vocab_size, d), d**-0.5)


def _layer(family: Family, prefix: str, sizes: Sizes) -> Iterator[TensorSpec]:
    d, f = sizes.width, sizes.expert_width
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    into_residual = (2 * sizes.num_layers) ** -0.5
    yield TensorSpec(f"{prefix}.input_layernorm.weight", (d,), None)
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        yield TensorSpec(f"{prefix}.self_attn.{name}_proj.weight", (rows, d), d**-0.5)
    yield TensorSpec(f"{prefix}.self_attn.o_proj.weight", (d, q), q**-0.5 * into_residual)
    for name, width in zip("qk", family.norm_widths(sizes) or (), strict=False):
        yield TensorSpec(f"{prefix}.self_attn.{name}_norm.weight", (width,), None)
    yield TensorSpec(f"{prefix}.post_attention_layernorm.weight", (d,), None)
    yield TensorSpec(f"{prefix}.{family.moe}.gate.weight", (sizes.num_experts, d), d**-0.5)
    gate, up, down = family.expert_parts
    for expert in range(sizes.num_experts):
        base = f"{prefix}.{family.moe}.experts.{expert}"
        yield TensorSpec(f"{base}.{gate}.weight", (f, d), d**-0.5)
        yield TensorSpec(f"{base}.{up}.weight", (f, d), d**-0.5)
        yield TensorSpec(f"{base}.{down}.weight", (d, f), f**-0.5 * into_residual)


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def write_random_model(
    folder: Path, family: str, sizes: Sizes, *, dtype: str, seed: int, shard_bytes: int
) -> int:
    """Writes config, shards and index, and returns the number of parameters. The same seed gives
    the same files."""
    FAMILIES[family].check(sizes)
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(model_config(family, sizes, dtype), indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    item_bytes = DTYPES[dtype].itemsize
    shards = split_into_shards(tensor_specs(family, sizes), shard_bytes // item_bytes)
    generator = torch.Generator().manual_seed(seed)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {spec.name: _draw(spec, generator).to(DTYPES[dtype]) for spec in shard}
        save_file(tensors, folder / name, {"format": "pt"})
        (folder / name).chmod(0o644)
        files |= dict.fromkeys(tensors, name)
    num_parameters = sum(math.prod(spec.shape) for shard in shards for spec in shard)
    index = {"metadata": {"total_size": num_parameters * item_bytes}, "weight_map": files}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return num_parameters


def borrow_tokenizer(source: Path, folder: Path) -> bool:
    """Copies the tokenizer of another checkpoint; False if it has no tokenizer."""
    for name in _TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    return (source / "tokenizer.json").exists()


def split_into_shards(specs: Iterable[TensorSpec], max_elements: int) -> list[list[TensorSpec]]:
    """Groups tensors in order; a shard has at most `max_elements` unless one tensor alone is
    larger."""
    shards: list[list[TensorSpec]] = [[]]
    room = max_elements
    for spec in specs:
        size = math.prod(spec.shape)
        if size > room and shards[-1]:
            shards.append([])
            room = max_elements
        shards[-1].append(spec)
        room -= size
    return shards


def _draw(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    if spec.std is None:
        return torch.ones(spec.shape)
    return torch.randn(spec.shape, generator=generator) * spec.std


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a random MoE checkpoint.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen3_moe")
    for field in fields(Sizes):
        flag = "--" + field.name.replace("_", "-")
        if field.name == "is_tied":
            parser.add_argument("--tied", dest="is_tied", action="store_true", help="tie the head")
        else:
            parser.add_argument(flag, type=int, default=field.default, help="default %(default)s")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-mib", type=int, default=512, help="largest size of a file in MiB")
    parser.add_argument("--tokenizer", type=Path, default=Path("moe_serve/demo_model"))
    arguments = parser.parse_args()
    sizes = Sizes(**{field.name: getattr(arguments, field.name) for field in fields(Sizes)})
    num_parameters = write_random_model(
        arguments.folder,
        arguments.family,
        sizes,
        dtype=arguments.dtype,
        seed=arguments.seed,
        shard_bytes=arguments.shard_mib * 2**20,
    )
    has_tokenizer = borrow_tokenizer(arguments.tokenizer, arguments.folder)
    note = "" if has_tokenizer else f", no tokenizer ({arguments.tokenizer} has none)"
    sys.stdout.write(f"{arguments.folder}: {num_parameters / 1e6:,.1f} M parameters{note}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
