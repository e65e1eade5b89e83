"""Writes the weights of a Qwen3-MoE checkpoint as one GGUF file in their own dtype, for llama.cpp.

    envs/llama/bin/python scripts/write_gguf.py build/random-1b build/random-1b.gguf

Needs the packages `gguf` and numpy. Norms and routers are written as fp32, as llama.cpp requires.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from safetensors_file import Tensor, read_tensors

_QUANTIZATION = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
}
_FILE_TYPE = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
}
# (name in the checkpoint, name in the file) of a layer's tensors; experts are apart
_LAYER = (
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate", "ffn_gate_inp"),
)
_EXPERT = (
    ("gate_proj", "ffn_gate_exps"),
    ("up_proj", "ffn_up_exps"),
    ("down_proj", "ffn_down_exps"),
)
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # kinds of a token


def main() -> int:
    parser = argparse.ArgumentParser(description="Converts a Qwen3-MoE checkpoint to GGUF.")
    parser.add_argument("folder", type=Path, help="checkpoint in Hugging Face layout")
    parser.add_argument("gguf", type=Path, help="file to write")
    arguments = parser.parse_args()
    config = json.loads((arguments.folder / "config.json").read_text(encoding="utf-8"))
    _check(config)
    tensors = read_tensors(arguments.folder)
    writer = gguf.GGUFWriter(arguments.gguf, "qwen3moe")
    _add_sizes(writer, config)
    writer.add_file_type(_FILE_TYPE[tensors["model.embed_tokens.weight"].dtype])
    _add_tokenizer(writer, arguments.folder, int(config["vocab_size"]))
    _write(writer, lambda: _named(tensors, config))
    print(f"{arguments.gguf}: {arguments.gguf.stat().st_size / 2**30:.2f} GiB")
    return 0


def _check(config: dict[str, Any]) -> None:
    """Raises an error unless every layer has MoE and weights sum to 1 over the top-k, as
    llama.cpp requires.
    """
    if config["model_type"] != "qwen3_moe":
        raise SystemExit(f"model_type is {config['model_type']!r}: only qwen3_moe is written.")
    is_plain = config.get("decoder_sparse_step", 1) == 1 and not config.get("mlp_only_layers")
    if not (is_plain and config.get("norm_topk_prob")):
        raise SystemExit("llama.cpp wants experts in every layer and norm_topk_prob = true.")


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    """Adds a byte-level BPE vocabulary. The benchmark sends ids; the vocabulary is needed only to
    load the file."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = [f"[UNUSED{i}]" for i in range(vocab_size)]
    kinds = [_UNUSED] * vocab_size
    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i], kinds[i] = token, _NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], _CONTROL
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(kinds.index(_CONTROL))


def _named(tensors: dict[str, Tensor], config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in the file, tensor) with the experts of a layer stacked: [expert, out, in]."""
    yield "token_embd.weight", tensors["model.embed_tokens.weight"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for theirs, ours in _LAYER:
            yield f"blk.{layer}.{ours}.weight", tensors[f"{prefix}.{theirs}.weight"]
        for theirs, ours in _EXPERT:
            experts = [
                tensors[f"{prefix}.mlp.experts.{expert}.{theirs}.weight"]
                for expert in range(config["num_experts"])
            ]
            stacked = np.stack([expert.data for expert in experts])
            yield f"blk.{layer}.{ours}.weight", Tensor(experts[0].dtype, stacked)
    yield "output_norm.weight", tensors["model.norm.weight"]
    if not config.get("tie_word_embeddings"):
        yield "output.weight", tensors["lm_head.weight"]


def _write(writer: gguf.GGUFWriter, tensors: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
    """Reads the tensors twice, for the table and for the bytes, so that only one is in memory at
    a time.
    """
    for name, tensor in tensors():
        tensor = _as_stored(name, tensor)
        writer.add_tensor_info(
            name,
            tensor.data.shape,
            tensor.data.dtype,
            tensor.data.nbytes,
            raw_dtype=_QUANTIZATION[tensor.dtype],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors():
        writer.write_tensor_data(_as_stored(name, tensor).data)
    writer.close()


def _as_stored(name: str, tensor: Tensor) -> Tensor:
    if tensor.data.ndim == 1 or "ffn_gate_inp" in name:
        return Tensor("F32", tensor.as_float32())
    return tensor


if __name__ == "__main__":
    raise SystemExit(main())
