"""Checkpoints with a layer that predicts further tokens, and a reference of that layer in fp32.

The reference follows the description of the DeepSeek-V3 report (section 2.2) and has the decoder
layer of transformers, whose weights it reads under the names of the published checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import cache_utils, modeling_layers

from tests.support.families.all_cases import CASES
from tests.support.families.parity import write_checkpoint

APART = ("exaone_moe", "mellum")  # their layers are stored as `mtp.`
FILE = "model-mtp.safetensors"


def write_with_mtp(folder: Path, name: str, *, is_own_head: bool = False) -> Path:
    """Writes a family's tiny checkpoint, with random weights of an MTP layer in a file of its own.

    `is_own_head`: its embedding and head are others than the model's, not copies.
    """
    write_checkpoint(folder, CASES[name])
    layer = _layer(folder)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if "norm" in key and tensor.dim() == 1:
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                tensor.normal_(0, 0.2, generator=generator)
    config, width = _config(folder), layer.input_layernorm.weight.shape[0]
    is_apart = config.model_type in APART
    root = "mtp." if is_apart else f"model.layers.{config.num_hidden_layers}."
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    if not is_apart:
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    weights = {
        f"{root}{key}.weight": torch.rand(width, generator=generator) + 0.5
        for key in (names[0], names[1], names[3])
    }
    weights[f"{root}{names[2]}.weight"] = torch.randn(width, 2 * width, generator=generator) * 0.15
    decoder = root + ("layers.0." if is_apart else "")
    weights |= {decoder + key: t for key, t in _published(layer.state_dict()).items()}
    if not is_apart:
        stored = load_file(folder / "model.safetensors")
        embedding = stored["model.embed_tokens.weight"]
        head = stored.get("lm_head.weight", embedding)
        copies = [each.clone() * (-0.5 if is_own_head else 1.0) for each in (embedding, head)]
        weights[root + "embed_tokens.weight"], weights[root + "shared_head.head.weight"] = copies
    save_file({key: t.contiguous().clone() for key, t in weights.items()}, folder / FILE)
    return folder


class MTPReference:
    """Computes the layer's logits from the model's states, all positions at once."""

    def __init__(self, folder: Path) -> None:
        self.config, self.weights = _config(folder), load_file(folder / FILE)
        model_class = getattr(transformers, self.config.architectures[0])
        self.model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
        self.is_apart = self.config.model_type in APART
        self.root = "mtp." if self.is_apart else f"model.layers.{self.config.num_hidden_layers}."
        self.layer = _layer(folder)
        prefix = self.root + ("layers.0." if self.is_apart else "")
        own = {key.removeprefix(prefix): t for key, t in self.weights.items() if prefix in key}
        state = self.layer.state_dict()
        self.layer.load_state_dict(
            {key: _fused(own, key) if key not in own else own[key] for key in state}
        )
        self.layer.eval()

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> Tensor:
        """Returns the model's states behind its final norm, [T, D]."""
        states: Tensor = self.model.model(torch.tensor([token_ids])).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def next_states(self, state_TD: Tensor, next_ids: list[int]) -> Tensor:
        """Returns the layer's states [T, D] from those before it and the tokens that follow."""
        a, b, c, d = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        if self.is_apart:
            a, b, c, d = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        embedding = self._own("embed_tokens", self.model.get_input_embeddings().weight)
        token_TD = self._norm(embedding[torch.tensor(next_ids)], a)
        x_TD = torch.cat((token_TD, self._norm(state_TD, b)), dim=1) @ self._weight(c).T
        positions = torch.arange(len(next_ids))[None]
        rope, base = {}, self.model.model
        kind = (getattr(self.config, "mtp_layer_types", None) or ["sliding_attention"])[0]
        if self.config.model_type == "mellum":
            rope["layer_type"] = kind
        is_windowed = self.is_apart and kind == "sliding_attention"
        ages = positions.T - positions  # of each key, seen from each query
        is_hidden = (ages < 0) | (ages >= self.config.sliding_window if is_windowed else ages < 0)
        mask = torch.zeros(1, 1, *ages.shape).masked_fill(is_hidden, float("-inf"))
        out = self.layer(
            x_TD[None],
            attention_mask=mask,
            position_embeddings=base.rotary_emb(x_TD[None], position_ids=positions, **rope),
            position_ids=positions,
        )
        return self._norm(out[0] if out.dim() == 3 else out, d)

    def logits(self, state_TD: Tensor) -> Tensor:
        head = self._own("shared_head.head", self.model.get_output_embeddings().weight)
        return state_TD @ head.detach().T

    @torch.inference_mode()
    def theirs(self, state_TD: Tensor, next_ids: list[int]) -> Tensor:
        """Returns what `next_states` returns, computed by the layer of transformers."""
        theirs = modeling_layers.MtpModel(self.model, 1).eval()
        layer = theirs.layers[0]
        layer.mtp_block.load_state_dict(self.layer.state_dict())
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        parts = (layer.enorm, layer.hnorm, layer.eh_proj, layer.post_norm)
        for name, part in zip(names, parts, strict=True):
            part.weight.copy_(self._weight(name))
        cache = cache_utils.MtpCache(config=self.config.get_mtp_config())
        ids, places = torch.tensor([next_ids]), torch.arange(1, len(next_ids) + 1)[None]
        states: Tensor = theirs.forward_layer(0, state_TD[None], places, cache, input_ids=ids)
        return states[0]

    def _own(self, key: str, theirs: Tensor) -> Tensor:
        return self.weights.get(f"{self.root}{key}.weight", theirs)

    def _weight(self, key: str) -> Tensor:
        return self.weights[f"{self.root}{key}.weight"]

    def _norm(self, x_TD: Tensor, key: str) -> Tensor:
        scale = torch.rsqrt(x_TD.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x_TD * scale * self._weight(key)


def _config(folder: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(folder)


def _layer(folder: Path) -> Any:
    """Makes the family's decoder layer: sparse, but dense in EXAONE."""
    config = _config(folder)
    model_class = getattr(transformers, config.architectures[0])
    values = json.loads((folder / "config.json").read_text())
    kind = "dense" if config.model_type == "exaone_moe" else "sparse"
    values |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": [kind]}
    if config.model_type in APART:
        values["layer_types"] = ["sliding_attention"]
    tiny = model_class(type(config)(**values))
    layer: nn.Module = tiny.model.layers[0]
    return layer


def _published(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a layer's weights under published names: experts apart."""
    found: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        if key == "mlp.experts.gate_up_proj":
            for expert, fused in enumerate(tensor):
                gate, up = fused.chunk(2)
                found[f"mlp.experts.{expert}.gate_proj.weight"] = gate
                found[f"mlp.experts.{expert}.up_proj.weight"] = up
        elif key == "mlp.experts.down_proj":
            found |= {f"mlp.experts.{i}.down_proj.weight": down for i, down in enumerate(tensor)}
        else:
            found[key] = tensor
    return found


def _fused(weights: Mapping[str, Tensor], key: str) -> Tensor:
    """Returns the fused experts that transformers has in place of the published ones."""

    def all_of(part: str) -> list[Tensor]:
        names = (f"mlp.experts.{i}.{part}_proj.weight" for i in range(len(weights)))
        return [weights[name] for name in names if name in weights]

    if key.endswith("down_proj"):
        return torch.stack(all_of("down"))
    assert key.endswith("gate_up_proj"), f"{key} is missing"
    pairs = zip(all_of("gate"), all_of("up"), strict=True)
    return torch.stack([torch.cat(pair) for pair in pairs])
