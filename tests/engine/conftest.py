"""Tiny random checkpoints, one per family, written by transformers: the reference and the input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 300
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_CONFIGS = {
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **_COMMON, num_experts=8, moe_intermediate_size=40, head_dim=32, norm_topk_prob=True
    ),
    "qwen3_moe-biased": transformers.Qwen3MoeConfig(
        **_COMMON,
        num_experts=8,
        moe_intermediate_size=32,
        head_dim=16,
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "mixtral": transformers.MixtralConfig(**_COMMON, num_local_experts=4, intermediate_size=64),
    "mixtral-window": transformers.MixtralConfig(
        **_COMMON, num_local_experts=4, intermediate_size=64, sliding_window=24
    ),
    "olmoe": transformers.OlmoeConfig(**_COMMON, num_experts=8, intermediate_size=32),
    "olmoe-clipped": transformers.OlmoeConfig(
        **_COMMON, num_experts=8, intermediate_size=32, clip_qkv=0.8, norm_topk_prob=True
    ),
}
VARIANTS = tuple(_CONFIGS)


def byte_tokenizer() -> Tokenizer:
    """256 bytes after `<|endoftext|>`, and filler up to the vocabulary's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<|endoftext|>", *alphabet])}
    vocab |= {f"<filler{i}>": i for i in range(len(vocab), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_checkpoint(folder: Path, variant: str) -> Path:
    """Random weights of one variant, in fp32; norms and biases are random too."""
    torch.manual_seed(len(variant))
    config = _CONFIGS[variant]
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(autouse=True)
def _no_hidden_faults(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """Makes a failed step fail the test; the engine would hide the fault by running it again."""
    yield
    if request.node.get_closest_marker("faults") is None:
        failures = [r.getMessage() for r in caplog.get_records("call") if "failed" in r.message]
        assert not failures, failures


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns {variant: folder}."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {variant: write_checkpoint(root / variant, variant) for variant in VARIANTS}


@pytest.fixture(scope="session")
def tiny(checkpoints: dict[str, Path]) -> str:
    """A tiny model for tests that do not depend on the family."""
    return str(checkpoints["qwen3_moe"])
