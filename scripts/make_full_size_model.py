"""Writes a random checkpoint with the exact shapes, names and storage of a published large model.

    python scripts/make_full_size_model.py build/gpt-oss-20b --model gpt-oss-20b
    python scripts/make_full_size_model.py build/qwen3-30b --model Qwen3-30B-A3B --group 128
    python scripts/make_full_size_model.py build/trial --model gpt-oss-20b --layers 2 --vocab 4096

gpt-oss-20b has experts in MXFP4 (`_blocks` and `_scales`), as published, and takes 13.8 GB.
Qwen3-30B-A3B has all linear layers except the routers and the head in int4, as compressed-tensors
`pack-quantized`; with groups of 32 it takes 18.1 GB, with groups of 128 16.7 GB. The values of
config.json are the published ones (`configs/models/`).

Values are drawn and written in pieces of 16 MiB, so no tensor is in memory as a whole. A tensor's
values depend on its name, its shape and the seed alone: the same flags give the same files, and
with `--layers N` the tensors are those of the first N layers. `--layers`, `--experts` and `--vocab`
make smaller versions for trials and tests.

The weights are random, so the model answers with noise: it measures load time, memory and speed.
The tokenizer is a stand-in with the published vocabulary size and the published ids of the control
tokens. It encodes text as single bytes, because no package ships the published vocabularies.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from moe_serve.errors import MoeServeError
from moe_serve.model.checkpoint.checkpoint_writer import CheckpointWriter
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.manifest import Stored, all_tensors
from moe_serve.model.checkpoint.safetensors_writer import PlannedTensor
from moe_serve.model.families import family_of

_ROOT = Path(__file__).resolve().parents[1]
_CHAT_TEMPLATE = _ROOT / "moe_serve" / "demo_model" / "chat_template.jinja"
_PIECE_VALUES = 2**22
_MXFP4_BLOCK = 32
_MXFP4_RMS = 8.5625**0.5  # the root mean square of the 16 values of E2M1
_INT4_RMS = 21.5**0.5  # and of the whole numbers from -8 to 7
_EXPONENT_BIAS = 127  # of E8M0


@dataclass(frozen=True, slots=True)
class Published:
    """A published model: its control tokens by id, and the storage of its weights."""

    control_tokens: Mapping[int, str]
    is_int4: bool  # compressed-tensors; otherwise as its config says


MODELS = {
    "gpt-oss-20b": Published(
        {
            199998: "<|startoftext|>",
            199999: "<|endoftext|>",
            200002: "<|return|>",
            200003: "<|constrain|>",
            200005: "<|channel|>",
            200006: "<|start|>",
            200007: "<|end|>",
            200008: "<|message|>",
            200012: "<|call|>",
        },
        is_int4=False,
    ),
    "Qwen3-30B-A3B": Published(
        {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"}, is_int4=True
    ),
}


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A tensor to write, and what its values look like.

    `values`: "ones"; "normal" with standard deviation `scale`; "bytes", each equally likely;
    "exponents" of E8M0 around `scale`; "scales", positive and around `scale`; "shape", [N, K] of
    `of`.
    """

    planned: PlannedTensor
    values: str
    scale: float = 1.0
    of: tuple[int, ...] = ()

    def pieces(self, seed: int) -> Iterator[Tensor]:
        rng = np.random.default_rng([seed, zlib.crc32(self.planned.name.encode())])
        if self.values == "shape":
            yield torch.tensor(self.of, dtype=self.planned.dtype)
            return
        left = math.prod(self.planned.shape)
        while left:
            num = min(left, _PIECE_VALUES)
            left -= num
            yield self._draw(num, rng)

    def _draw(self, num: int, rng: np.random.Generator) -> Tensor:
        dtype = self.planned.dtype
        if self.values == "ones":
            return torch.ones(num, dtype=dtype)
        if self.values == "normal":
            drawn = rng.standard_normal(num, dtype=np.float32)
            return torch.from_numpy(drawn).mul_(self.scale).to(dtype)
        if self.values == "scales":
            drawn = rng.random(num, dtype=np.float32)
            return torch.from_numpy(drawn).add_(0.5).mul_(self.scale).to(dtype)
        if self.values == "exponents":
            middle = _EXPONENT_BIAS + round(math.log2(self.scale))
            return torch.from_numpy(rng.integers(middle - 1, middle + 2, num, dtype=np.uint8))
        words = rng.integers(0, 2**64, -(-num * dtype.itemsize // 8), dtype=np.uint64)
        return torch.from_numpy(words.view(np.uint8)[: num * dtype.itemsize]).view(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Sizes that are smaller than the published ones; None keeps the published size."""

    num_layers: int | None = None
    num_experts: int | None = None
    vocab_size: int | None = None


def published_config(model: str, group: int, cuts: Cuts = Cuts()) -> dict[str, Any]:
    """Returns config.json, with the storage of int4 weights if the model has them."""
    path = _ROOT / "configs" / "models" / f"{model}.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    del config["_name_or_path"]
    of_experts = "num_experts" if "num_experts" in config else "num_local_experts"
    _cut(config, "num_hidden_layers", "--layers", cuts.num_layers, 1)
    _cut(config, of_experts, "--experts", cuts.num_experts, config["num_experts_per_tok"])
    _cut(config, "vocab_size", "--vocab", cuts.vocab_size, 512)
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    config["eos_token_id"] = next(
        id for id, token in control_tokens(model, config["vocab_size"]).items()
        if token == MODELS[model].control_tokens[config["eos_token_id"]]
    )  # fmt: skip
    if MODELS[model].is_int4:
        if config["moe_intermediate_size"] % group or config["hidden_size"] % group:
            raise ValueError(f"--group is {group}, which does not divide the widths of {model}")
        config["quantization_config"] = _int4_config(group)
    return config


def _cut(config: dict[str, Any], key: str, flag: str, value: int | None, least: int) -> None:
    if value is None:
        return
    if not least <= value <= config[key]:
        raise ValueError(f"{flag} is {value}; this model has {least} to {config[key]}")
    config[key] = value


def control_tokens(model: str, vocab_size: int) -> dict[int, str]:
    """Returns the control tokens by id: the published ids, or the last ones of a cut vocabulary."""
    tokens = MODELS[model].control_tokens
    if max(tokens) < vocab_size:
        return dict(tokens)
    return dict(enumerate(tokens.values(), start=vocab_size - len(tokens)))


def _int4_config(group: int) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": group,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    return {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": weights,
            }
        },
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*mlp\\.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def random_tensors(config: dict[str, Any], model: str, group: int) -> list[RandomTensor]:
    """Returns all tensors in file order."""
    read = HFConfig(config, f"{model}: config.json")
    family = family_of(read)
    spec = family.read_spec(read)
    layout = family.names.experts[0]
    whole = published_config(model, group)["num_hidden_layers"]
    tensors: list[RandomTensor] = []
    for stored in all_tensors(family.names, layout, spec):
        std = _std(stored, spec.width, whole, is_transposed=bool(layout.gate_up))
        is_expert = ".experts." in stored.name and len(stored.shape) == 3
        if is_expert and not MODELS[model].is_int4:
            tensors += _mxfp4(stored, std)
        elif MODELS[model].is_int4 and stored.name.endswith("_proj.weight"):
            tensors += _int4(stored, std, group)
        else:
            kind = "ones" if stored.name.endswith("norm.weight") else "normal"
            tensors.append(RandomTensor(_planned(stored.name, stored.shape), kind, std))
    return tensors


def _std(stored: Stored, width: int, num_layers: int, *, is_transposed: bool) -> float:
    """Returns a scale that keeps activations and logits near 1 at any depth."""
    if stored.name.endswith("embed_tokens.weight"):
        return 1.0
    if len(stored.shape) == 1 or stored.name.endswith("bias"):
        return 0.02
    fan_in = stored.shape[1] if is_transposed and len(stored.shape) == 3 else stored.shape[-1]
    into_residual = "o_proj" in stored.name or "down_proj" in stored.name
    return float(fan_in**-0.5 * ((2 * num_layers) ** -0.5 if into_residual else 1.0))


def _planned(
    name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> PlannedTensor:
    return PlannedTensor(name, dtype, shape)


def _mxfp4(stored: Stored, std: float) -> list[RandomTensor]:
    num_experts, num_inputs, num_outputs = stored.shape
    grid = (num_experts, num_outputs, num_inputs // _MXFP4_BLOCK)
    blocks = _planned(f"{stored.name}_blocks", (*grid, _MXFP4_BLOCK // 2), torch.uint8)
    scales = _planned(f"{stored.name}_scales", grid, torch.uint8)
    return [
        RandomTensor(blocks, "bytes"),
        RandomTensor(scales, "exponents", std / _MXFP4_RMS),
    ]


def _int4(stored: Stored, std: float, group: int) -> list[RandomTensor]:
    num_rows, num_columns = stored.shape
    words = _planned(f"{stored.name}_packed", (num_rows, num_columns // 8), torch.int32)
    scales = _planned(f"{stored.name}_scale", (num_rows, num_columns // group))
    shape = _planned(f"{stored.name}_shape", (2,), torch.int64)
    return [
        RandomTensor(words, "bytes"),
        RandomTensor(scales, "scales", std / _INT4_RMS),
        RandomTensor(shape, "shape", of=stored.shape),
    ]


def stand_in_tokenizer(vocab_size: int, controls: Mapping[int, str]) -> Tokenizer:
    """Returns a tokenizer of `vocab_size` ids: 256 bytes, control tokens, and filler."""
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {f"<filler{i}>": i for i in range(len(vocab), vocab_size) if i not in controls}
    vocab |= {token: i for i, token in controls.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token in controls.values()]
    tokenizer.add_special_tokens(special)
    return tokenizer


def other_files(config: Mapping[str, Any], model: str) -> dict[str, bytes]:
    """Returns the tokenizer, its config, a chat template and the generation config."""
    controls = control_tokens(model, config["vocab_size"])
    tokenizer = stand_in_tokenizer(config["vocab_size"], controls)
    eos = config["eos_token_id"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": controls[eos]}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
        "chat_template.jinja": _CHAT_TEMPLATE.read_bytes(),
        "generation_config.json": json.dumps({"eos_token_id": eos}).encode(),
    }


def write_full_size_model(
    folder: Path, model: str, *, group: int = 32, cuts: Cuts = Cuts(), seed: int = 0
) -> int:
    """Writes the checkpoint and returns the bytes of its tensors."""
    config = published_config(model, group, cuts)
    tensors = random_tensors(config, model, group)
    total = sum(tensor.planned.nbytes for tensor in tensors)
    with CheckpointWriter(folder, [tensor.planned for tensor in tensors]) as writer:
        written = 0
        for tensor in tensors:
            writer.write(tensor.planned.name, tensor.pieces(seed))
            before, written = written, written + tensor.planned.nbytes
            if written // 2**30 != before // 2**30:
                sys.stderr.write(f"{written / 1e9:.1f} of {total / 1e9:.1f} GB\n")
        writer.finish(config, other_files(config, model))
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a random checkpoint of a published size.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--layers", type=int, help="write only the first N layers")
    parser.add_argument("--experts", type=int, help="give each layer only N experts")
    parser.add_argument("--vocab", type=int, help="cut the vocabulary to N tokens")
    parser.add_argument(
        "--group", type=int, choices=(32, 64, 128), default=32,
        help="inputs that share a scale in int4; default %(default)s",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        num_bytes = write_full_size_model(
            arguments.folder,
            arguments.model,
            group=arguments.group,
            cuts=Cuts(
                num_layers=arguments.layers,
                num_experts=arguments.experts,
                vocab_size=arguments.vocab,
            ),
            seed=arguments.seed,
        )
    except (MoeServeError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{arguments.folder}: {num_bytes:,} bytes of tensors\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
