"""Trains small adapters of the demonstration model, on the pages of this project's manual.

A LoRA adds B A to the matrices of attention. An ESFT replaces, in each layer, the experts that the
pages' tokens choose most. All other weights are frozen. R rank, E experts, n of them replaced.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils import parametrize

from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.offline.llm import LLM

from .evaluation import evaluate
from .export import hf_names
from .network import Network
from .training import Batches, encode_documents

_PROJECTIONS = ("q", "k", "v", "o")
_MATRICES = ("gate", "up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRecipe:
    """The settings of a training run. Equal settings and texts give equal adapters."""

    num_steps: int
    learning_rate: float
    rank: int = 0  # of a LoRA; 0: an ESFT
    num_experts: int = 2  # of each layer, of an ESFT
    batch_tokens: int = 2048
    context: int = 512
    seed: int = 20261126


class _Added(nn.Module):
    """A matrix with the addition B A, whose scale is 1 (`lora_alpha` = `r`)."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        num_outputs, num_inputs = weight.shape
        self.a_RK = nn.Parameter(torch.randn(rank, num_inputs) * num_inputs**-0.5)
        self.b_NR = nn.Parameter(torch.zeros(num_outputs, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b_NR @ self.a_RK


class _Replaced(nn.Module):
    """The experts of a layer, some of which are others."""

    def __init__(self, weight: Tensor, experts_n: Tensor) -> None:
        super().__init__()
        self.register_buffer("experts_n", experts_n)
        self.own = nn.Parameter(weight.detach()[experts_n].clone())

    def forward(self, weight: Tensor) -> Tensor:
        return weight.index_copy(0, self.get_buffer("experts_n"), self.own)


class TrainedAdapter:
    """A network with an adapter in it."""

    def __init__(self, network: Network, experts: list[list[int]] | None, rank: int) -> None:
        """`experts`: those of each layer that an ESFT replaces; None: a LoRA of this rank."""
        self.network, self._experts, self._rank = network, experts, rank
        network.requires_grad_(False)
        self._parts: dict[str, _Added | _Replaced] = {}
        for index, layer in enumerate(network.layers):
            names = _PROJECTIONS if experts is None else _MATRICES
            owner = cast(nn.Module, layer.attention if experts is None else layer.moe)
            for name in names:
                weight = getattr(owner, name)
                part: _Added | _Replaced = (
                    _Added(weight, rank)
                    if experts is None
                    else _Replaced(weight, torch.tensor(experts[index]))
                )
                parametrize.register_parametrization(owner, name, part)
                room = "attention" if experts is None else "moe"
                self._parts[f"layers.{index}.{room}.{name}"] = part

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for part in self._parts.values() for p in part.parameters()]

    def save(self, folder: Path) -> None:
        """Writes the adapter as PEFT or ESFT does, in bf16, and rounds the one in the network."""
        folder.mkdir(parents=True, exist_ok=True)
        for parameter in self.parameters:
            parameter.data = parameter.data.bfloat16().float()
        if self._experts is None:
            name, config, weights = "adapter_config.json", self._peft_config(), "adapter_model"
        else:
            name, config, weights = "expert_cfg.json", self._esft_config(), "model"
        (folder / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensors = {k: t.detach().bfloat16().contiguous() for k, t in self._tensors().items()}
        save_file(tensors, folder / f"{weights}.safetensors", {"format": "pt"})
        (folder / f"{weights}.safetensors").chmod(0o644)

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, part in self._parts.items():
            names = hf_names(name, self.network.shape.num_experts)
            if isinstance(part, _Added):
                module = f"base_model.model.{names[0].removesuffix('.weight')}"
                tensors[f"{module}.lora_A.weight"] = part.a_RK
                tensors[f"{module}.lora_B.weight"] = part.b_NR
            else:
                experts = part.get_buffer("experts_n").tolist()
                tensors |= {names[e]: own for e, own in zip(experts, part.own, strict=True)}
        return tensors

    def _peft_config(self) -> dict[str, object]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "moe-serve-demo",
            "r": self._rank,
            "lora_alpha": self._rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": [f"{name}_proj" for name in _PROJECTIONS],
        }

    def _esft_config(self) -> dict[str, object]:
        assert self._experts is not None, "an ESFT replaces experts"
        listed = {str(layer): ids for layer, ids in enumerate(self._experts)}
        return {"experts": listed, "shared_experts": False, "non_expert_modules": False}


def busiest_experts(
    network: Network, tokenizer: Tokenizer, texts: list[str], count: int
) -> list[list[int]]:
    """Returns the experts of each layer that the tokens of some texts choose most, ascending."""
    choices_LE = evaluate(network, tokenizer, texts).choices
    return [sorted(row.topk(count).indices.tolist()) for row in choices_LE]


def train_adapter(
    network: Network, tokenizer: Tokenizer, texts: list[str], recipe: AdapterRecipe
) -> TrainedAdapter:
    """Trains on texts. The learning rate falls to zero."""
    torch.manual_seed(recipe.seed)
    experts = None
    if not recipe.rank:
        sample = some(texts, 30_000)
        experts = busiest_experts(network, tokenizer, sample, recipe.num_experts)
    adapter = TrainedAdapter(network, experts, recipe.rank)
    optimizer = torch.optim.Adam(adapter.parameters, betas=(0.9, 0.95))
    batches = Batches(encode_documents(tokenizer, texts), recipe.seed)
    for step in range(recipe.num_steps):
        progress = step / recipe.num_steps
        scale = min(1.0, (step + 1) / 4) * 0.5 * (1 + math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * scale
        ids, targets = batches.draw(recipe.batch_tokens, recipe.context)
        loss, _, _ = network.loss(ids, targets)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step} of {recipe.num_steps}: loss {loss.item():.3f}", flush=True)
    return adapter


def read_manual(docs: Path) -> tuple[list[str], list[str]]:
    """Returns the pages of a manual for training, and each fifth for validation."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(docs.rglob("*.md"))]
    return [page for i, page in enumerate(pages) if i % 5], pages[::5]


def some(texts: list[str], num_bytes: int) -> list[str]:
    """Returns texts of about this size, spread over all."""
    stride = max(1, sum(len(text) for text in texts) // num_bytes)
    return texts[::stride]


def windows(
    tokenizer: Tokenizer, texts: list[str], width: int, count: int, seed: int = 1
) -> list[list[int]]:
    """Returns runs of tokens from different places of the texts."""
    stream = encode_documents(tokenizer, texts).astype(np.int64)
    starts = np.random.default_rng(seed).integers(0, max(1, len(stream) - width), count)
    return [stream[start : start + width].tolist() for start in sorted(starts)]


def served_bits(
    llm: LLM, tokenizer: Tokenizer, prompts: list[list[int]], adapter: str | None
) -> float:
    """Returns the bits per byte that a server's model needs for runs of tokens, without the first
    token of each."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    nats, num_bytes = 0.0, 0
    for output in llm.generate(prompts, params, adapter=adapter, use_progress_bar=False):
        ids = output.prompt_token_ids[1:]
        for token, described in zip(ids, (output.prompt_logprobs or [])[1:], strict=True):
            assert described is not None, "a token after the first has a log probability"
            nats -= described[token].logprob
        num_bytes += len(tokenizer.decode(list(ids), skip_special_tokens=False).encode())
    return nats / math.log(2) / num_bytes
