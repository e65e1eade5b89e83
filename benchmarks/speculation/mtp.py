"""Measures what a checkpoint's MTP layer costs, and what it gains if it is right or wrong.

    python benchmarks/run.py mtp
    python benchmarks/run.py mtp --layers 16 --rounds 7

The weights are constructed: the model's next token is always the last one plus 1, and the layer
knows that, or never does. Attention and experts are computed in full, with random weights whose
results are multiplied by 0. So times are real, and the acceptance is chosen: it is not the figure
of any model. Two engines, with and without the layer, answer the same requests in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from harness.environment import describe_environment, write_report
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams

from .turns import Bench, Comparison, Turn, comparison, line

_TOKENS = 96
_WIDTH, _EXPERTS, _EXPERT_WIDTH, _VOCAB_SIZE = 768, 32, 512, 8192
_HEADS, _KV_HEADS, _HEAD_DIM = 12, 4, 64


def _config(num_layers: int) -> dict[str, object]:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "dtype": "bfloat16",
        "vocab_size": _VOCAB_SIZE,
        "hidden_size": _WIDTH,
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "n_routed_experts": _EXPERTS,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": _EXPERT_WIDTH,
        "intermediate_size": 4 * _EXPERT_WIDTH,
        "first_k_dense_replace": 0,
        "max_position_embeddings": 1024,
        "eos_token_id": 0,
    }


def _layer(root: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns a decoder layer that adds nothing to its input."""
    d, f = _WIDTH, _EXPERT_WIDTH

    def random(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator) * float(shape[-1] ** -0.5)
        return values.bfloat16()

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    weights = {
        "input_layernorm.weight": torch.ones(d).bfloat16(),
        "post_attention_layernorm.weight": torch.ones(d).bfloat16(),
        "self_attn.q_proj.weight": random(_HEADS * _HEAD_DIM, d),
        "self_attn.k_proj.weight": random(_KV_HEADS * _HEAD_DIM, d),
        "self_attn.v_proj.weight": random(_KV_HEADS * _HEAD_DIM, d),
        "self_attn.o_proj.weight": zeros(d, _HEADS * _HEAD_DIM),
        "mlp.gate.weight": random(_EXPERTS, d),
        "mlp.gate.e_score_correction_bias": torch.zeros(_EXPERTS),
    }
    for expert in range(_EXPERTS):
        base = f"mlp.experts.{expert}."
        weights |= {f"{base}{part}_proj.weight": random(f, d) for part in ("gate", "up")}
        weights[f"{base}down_proj.weight"] = zeros(d, f)
    return {root + name: tensor for name, tensor in weights.items()}


def write_models(folder: Path, num_layers: int) -> dict[str, Path]:
    """Writes a checkpoint whose layer is always right, and one whose layer never is."""
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(_VOCAB_SIZE, _WIDTH, generator=generator).bfloat16()
    weights = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding.roll(1, 0),
        "model.norm.weight": torch.ones(_WIDTH).bfloat16(),
    }
    for index in range(num_layers):
        weights |= _layer(f"model.layers.{index}.", generator)
    root = f"model.layers.{num_layers}."
    own = _layer(root, generator)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        own[f"{root}{name}.weight"] = torch.ones(_WIDTH).bfloat16()
    folders = {}
    for kind, factor in (("right", 1.0), ("never right", -1.0)):
        folders[kind] = folder / kind.replace(" ", "-")
        folders[kind].mkdir()
        own[f"{root}eh_proj.weight"] = (torch.eye(_WIDTH, 2 * _WIDTH) * factor).bfloat16()
        save_file(own, folders[kind] / "mtp.safetensors")
        (folders[kind] / "config.json").write_text(json.dumps(_config(num_layers)))
    save_file(weights, folders["right"] / "model.safetensors")
    os.link(folders["right"] / "model.safetensors", folders["never right"] / "model.safetensors")
    return folders


def _asked(batch: int) -> list[GenerationRequest]:
    params = SamplingParams(max_tokens=_TOKENS, temperature=0, ignore_eos=True)
    return [
        GenerationRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(range(1 + 300 * i, 33 + 300 * i)),
            params=params,
        )
        for i in range(batch)
    ]


def compare(folders: dict[str, Path], threads: int, rounds: int) -> Iterator[Comparison]:
    """Yields the comparisons. Raises AssertionError if a token differs."""
    plain = Bench(str(folders["right"]), threads, "off", max_num_seqs=16)
    for kind, most in (("right", 1), ("right", 2), ("right", 4), ("never right", 4)):
        bench = Bench(str(folders[kind]), threads, "mtp", max_num_seqs=16, max_tokens=most)
        drafting = bench.drafting(is_adaptive=kind != "right")
        for batch in (1, 8):
            asked = _asked(batch)
            off, on = list[Turn](), list[Turn]()
            bench.turn(asked, drafting)  # warm, as is the prefix cache
            plain.turn(asked, None)
            for number in range(rounds):
                for is_on in (False, True) if number % 2 else (True, False):
                    if is_on:
                        on.append(bench.turn(asked, drafting))
                    else:
                        off.append(plain.turn(asked, None))
                assert on[-1].answers == off[-1].answers, f"{kind}: drafts changed a token"
            yield comparison(f"{kind}, K = {most}, batch {batch}", off, on)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kind (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="kernel threads (default 1)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    environment = describe_environment()
    print(" ".join(f"{key}={value}" for key, value in environment.items()))
    found = []
    with TemporaryDirectory() as folder:
        folders = write_models(Path(folder), options.layers)
        print(f"{'':36} speedup (range)       by CPU  tok/step accepted rows/step v(n)")
        for each in compare(folders, options.threads, options.rounds):
            found.append(each)
            print(line(each), flush=True)
    write_report(options.json, {**environment, "figures": [asdict(each) for each in found]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
