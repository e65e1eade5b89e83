"""Makes the JSON files and the chat template that belong to the weights, in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path

from .network import Shape
from .vocabulary import END_OF_TEXT_ID, IM_END_ID, SPECIAL_TOKENS

# Renders as corpus.render_chat does; system messages have the same form. With tools, these are
# listed in the system message, which the model has never seen in training.
CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


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
