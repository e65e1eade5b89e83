"""Runs transformers' `generate` with a static cache; the model is built on the device from the
config.

E experts, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig, StaticCache

from gpu_bench.job import Job
from gpu_bench.model import RandomWeights, Shape, stored_weights

_GATE_UP, _DOWN = ".gate_up_proj", ".down_proj"


class Transformers:
    """transformers as an engine. On a GPU, `generate` compiles decoding if the entrant requests
    it.
    """

    def __init__(self, job: Job) -> None:
        self._device = torch.device(job.device)
        self._compilation: dict[str, Any] = {"disable_compile": True}
        if job.entrant.is_captured and self._device.type == "cuda":
            # One program for each number of rows, as static as its cache.
            self._compilation = {"compile_config": CompileConfig(dynamic=False)}
        config = AutoConfig.from_pretrained(job.folder)
        with self._device:
            self._model: Any = AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, job.dtype),
                experts_implementation=job.entrant.experts,
            ).eval()
        has_same = _fill(self._model, Path(job.folder), self._device)
        self._room = {
            (kind.num_prompts, kind.num_prompt_tokens): kind.num_prompt_tokens + kind.num_output
            for kind in sorted(job.work.kinds(), key=lambda kind: kind.num_output)
        }
        self._caches: dict[tuple[int, int], StaticCache] = {}
        generation = self._model.generation_config
        generation.eos_token_id, generation.pad_token_id = None, 0
        generation.do_sample = False
        generation.temperature = generation.top_p = generation.top_k = None
        self.facts = {
            "transformers": transformers.__version__,
            "experts": job.entrant.experts,
            "weights": "the same as ours" if has_same else "its own random ones",
        }

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], num_output: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=self._device)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_output,
            past_key_values=self._cache(ids.shape[0], ids.shape[1]),
            **self._compilation,
        )
        answers: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return answers

    def _cache(self, num_prompts: int, num_prompt_tokens: int) -> StaticCache:
        """Returns a cache for a kind of prompts, as long as its longest answer, so nothing is
        compiled again.

        Only the last cache is kept, so that only one takes memory.
        """
        key = (num_prompts, num_prompt_tokens)
        if key not in self._caches:
            self._caches.clear()
            self._caches[key] = StaticCache(
                config=self._model.config, max_cache_len=self._room[key]
            )
        self._caches[key].reset()
        return self._caches[key]


def _fill(model: Any, folder: Path, device: torch.device) -> bool:
    """Gives the model the same weights as our engine; returns False if names cannot be
    distinguished.

    transformers fuses experts that checkpoints store one by one.
    """
    stored = stored_weights(folder)
    weights = RandomWeights(device, model.dtype, model.config.num_hidden_layers)
    found = {name: _parts(name, parameter, stored) for name, parameter in model.named_parameters()}
    if not all(found.values()):
        return False
    with torch.no_grad():
        for part, place in (pair for parts in found.values() for pair in parts):
            place.copy_(weights.read(part, tuple(place.shape), place.dtype))
    return True


def _parts(name: str, parameter: Tensor, stored: Mapping[str, Shape]) -> list[tuple[str, Tensor]]:
    """Returns the stored weights that make a parameter with their places; empty if they are not
    known.
    """
    if stored.get(name) == tuple(parameter.shape):
        return [(name, parameter)]
    prefix, _, last = name.rpartition(".")
    parts = {_GATE_UP: ("gate_proj", "up_proj"), _DOWN: ("down_proj",)}.get(f".{last}", ())
    made = []
    for expert in range(len(parameter) if parts else 0):
        names = [f"{prefix}.{expert}.{part}.weight" for part in parts]
        places = parameter.data[expert].chunk(len(parts))
        made += list(zip(names, places, strict=True))
    is_known = all(stored.get(part) == tuple(place.shape) for part, place in made)
    return made if is_known else []
