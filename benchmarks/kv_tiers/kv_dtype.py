"""Measures KV pages in few bits: decoding over long contexts, and quality by domain.

    python scripts/make_random_model.py build/random-1b-32k --max-positions 33024
    python benchmarks/run.py kv_dtype --parts decode --model build/random-1b-32k --threads 2
    python benchmarks/run.py kv_dtype --parts quality --texts corpus

`decode` times steps of one sequence behind pages of random content; the data types take turns.
`quality` reads the valid texts of a folder of domains with the demonstration model, and with a
copy that has outlier channels: its keys are 16 times larger in two channels of a head, and its
queries 16 times smaller, which changes no product. "int4 plain" has no rotation.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.environment import write_report
from moe_kernels.interface.kv_form import FLOATS, KVForm, KVPages, kv_form
from moe_serve.cache.kv_cache import KVCache
from moe_serve.learn.documents import read_documents
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.stacked_layers import StackedLayers
from moe_serve.pipeline.transport import LocalTransport
from moe_serve.text.tokenizer import Tokenizer

_PAGE, _WINDOW = 16, 1024
_CPU = torch.device("cpu")
_OUTLIER = 16.0
FORMS: Mapping[str, KVForm] = {
    "auto": FLOATS,
    "int8": kv_form("int8"),
    "int4": kv_form("int4"),
    "int4 plain": KVForm(4),
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint without pages."""

    loader: ModelLoader
    max_positions: int

    @classmethod
    def load(cls, folder: Path, threads: int, max_positions: int) -> LoadedModel:
        torch.set_num_threads(threads)
        return cls(ModelLoader(folder, device=_CPU, num_threads=threads), max_positions)

    def pipelines(self, forms: Mapping[str, KVForm]) -> dict[str, Pipeline]:
        """Returns a pipeline for each form, over the same weights and pages of its own."""
        stage = self.loader.attention_stage(self.max_positions)
        experts = self.loader.expert_stage()
        made = {}
        for name, form in forms.items():
            num_pages = -(-self.max_positions // _PAGE)
            cache = KVCache(self.loader.spec, num_pages, _PAGE, self.loader.dtype, _CPU, form)
            for layer in cache.layers:
                _fill(layer)
            made[name] = Pipeline(stage, LocalTransport(experts), cache, _CPU)
            made[name].stacked = StackedLayers.of(stage, experts, cache)
        return made


def _fill(pages: KVPages) -> None:
    """Puts random content into pages, so that no page is read from the zero page of the system."""
    generator = torch.Generator().manual_seed(0)
    for part in (pages.keys, pages.values):
        if part.is_floating_point():
            part.normal_(generator=generator)
        else:
            part.random_(0, 100, generator=generator)
    for scales in (pages.key_scales, pages.value_scales):
        if scales is not None:
            scales.fill_(0.02)


def step(pipeline: Pipeline, start: int, tokens: list[int], num_logits: int) -> Tensor:
    pages = tuple(range(1, 2 + (start + len(tokens) - 1) // _PAGE))
    ids = np.asarray(tokens, dtype=np.int64)
    logits = pipeline.run(
        StepPlan((MicroBatch((SequenceSlice(0, start, ids, pages, num_logits),)),))
    )
    assert logits is not None, "logits were asked for"
    return logits


def decode(arguments: argparse.Namespace) -> dict[str, object]:
    """Times steps of one token behind long contexts."""
    contexts = sorted(arguments.contexts)
    model = LoadedModel.load(arguments.model, arguments.threads, contexts[-1] + _PAGE)
    spec, itemsize = model.loader.spec, model.loader.dtype.itemsize
    forms = {name: form for name, form in FORMS.items() if name != "int4 plain"}
    pipelines = model.pipelines(forms)
    result = dict[str, object]()
    for name, form in forms.items():
        share = spec.kv_bytes_per_token(itemsize, form) / spec.kv_bytes_per_token(itemsize)
        print(f"{name:5} {spec.kv_bytes_per_token(itemsize, form)} bytes a token: {share:.3f}")
        result[f"bytes {name}"] = share
    for context in contexts:
        times: dict[str, list[float]] = {name: [] for name in forms}
        for turn in range(-1, arguments.repeat):
            for name in list(forms)[:: 1 if turn % 2 else -1]:
                for _ in range(3 if turn < 0 else arguments.steps):
                    begin = time.perf_counter()
                    step(pipelines[name], context, [5], 1)
                    if turn >= 0:
                        times[name].append(time.perf_counter() - begin)
        for name in forms:
            pairs = zip(times["auto"], times[name], strict=True)
            gain = statistics.median(a / b for a, b in pairs)
            median = statistics.median(times[name]) * 1e3
            print(f"context {context:6}, {name:5} {median:8.2f} ms a token, {gain:.2f} x auto")
            result[f"{name} at {context}"] = {"times_s": times[name], "gain": gain}
    return result


def quality(arguments: argparse.Namespace) -> dict[str, object]:
    """Compares perplexities, and each token's distribution with that of the model's own dtype."""
    result = dict[str, object]()
    with tempfile.TemporaryDirectory() as folder:
        outliers = with_outliers(arguments.model, Path(folder) / "model")
        for name, path in (("as it is", arguments.model), ("outlier channels", outliers)):
            result[name] = _quality_of(path, name, arguments)
    return result


def with_outliers(source: Path, target: Path) -> Path:
    """Writes a copy of a Qwen3-MoE with two channels of larger keys in every head."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            for norm, factor in (("k_norm.weight", _OUTLIER), ("q_norm.weight", 1 / _OUTLIER)):
                if name.endswith(norm):
                    tensor[[3, 3 + len(tensor) // 2]] *= factor  # a rotated pair
        save_file(tensors, target / path.name)
    return target


def _quality_of(path: Path, title: str, arguments: argparse.Namespace) -> dict[str, object]:
    tokenizer = Tokenizer.load(path)
    model = LoadedModel.load(path, arguments.threads, _WINDOW)
    pipelines = model.pipelines(FORMS)
    result = dict[str, object]()
    for domain, windows in _windows(tokenizer, arguments).items():
        sums = {name: np.zeros(3) for name in FORMS}  # nats, KL, equal top tokens
        count = 0
        for tokens in windows:
            wanted = torch.tensor(tokens[1:])
            count += len(wanted)
            base = None
            for name, pipeline in pipelines.items():
                logits = step(pipeline, 0, tokens[:-1], len(tokens) - 1).float().log_softmax(-1)
                base = logits if base is None else base
                nats = -logits.gather(1, wanted[:, None]).sum().item()
                kl = (base.exp() * (base - logits)).sum().item()
                equal = (base.argmax(-1) == logits.argmax(-1)).sum().item()
                sums[name] += (nats, kl, equal)
        own = sums["auto"][0]
        row = {}
        for name, (nats, kl, equal) in sums.items():
            ratio = math.exp((nats - own) / count)
            row[name] = {"ppl": math.exp(nats / count), "ratio": ratio}
            row[name] |= {"kl": kl / count, "top1": equal / count}
            print(f"{title:17}{domain:14}{name:11}", end="")
            print(f"ppl {row[name]['ppl']:8.3f} = {ratio:.4f} x, ", end="")
            print(f"KL {kl / count:.5f}, top-1 {equal / count:.4f}")
        result[domain] = row
    return result


def _windows(tokenizer: Tokenizer, arguments: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Returns the first tokens of each domain's documents, `arguments.tokens` in all."""
    found: dict[str, list[list[int]]] = {}
    for domain, texts in _texts(arguments.texts):
        left, windows = arguments.tokens, list[list[int]]()
        for text in texts:
            ids = tokenizer.encode(text)[: min(_WINDOW, left)]
            if len(ids) >= 32:
                windows.append(ids)
                left -= len(ids)
            if left < 32:
                break
        found[domain] = windows
    return found


def _texts(folder: Path) -> Iterator[tuple[str, list[str]]]:
    for domain in sorted(path for path in folder.iterdir() if path.is_dir()):
        yield domain.name, [each.text for each in read_documents([domain], "valid")]


PARTS = {each.__name__: each for each in (decode, quality)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=demo_model_folder())
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 32768])
    parser.add_argument("--steps", type=int, default=3, help="tokens in a turn")
    parser.add_argument("--repeat", type=int, default=7, help="turns")
    parser.add_argument("--texts", type=Path, help="folder with a folder of texts per domain")
    parser.add_argument("--tokens", type=int, default=6000, help="of a domain")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if "quality" in arguments.parts and arguments.texts is None:
        parser.error("quality needs --texts, a folder with a folder of texts per domain")
    report = {name: PARTS[name](arguments) for name in arguments.parts}
    if arguments.json is not None:
        write_report(arguments.json, report)
    return 0
