"""Trains within a time budget, can resume, and logs JSON lines.

The learning rate warms up, holds, and falls linearly to zero over the last part of the time
budget; the context grows to its full length there too. A checkpoint holds the weights, the
optimizer's state and the time spent, all as safetensors (nothing is unpickled).

Matrices and stacked experts are optimised with Muon, the rest with Adam. Muon: K. Jordan et al.,
2024: momentum, then the update's nearest semi-orthogonal matrix by five Newton-Schulz steps.
`torch.optim.Muon` takes single matrices only; expert weights are stacks.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from .corpus import (
    DOMAINS,
    END_OF_TEXT_ID,
    IM_END_ID,
    Corpus,
    chat_tuning_texts,
    train_tokenizer,
    training_texts,
)
from .network import Network, Shape

_ADAM_NAMES = ("embedding", "router", "norm")


def orthogonalize(update: Tensor) -> Tensor:
    """Returns the quintic Newton-Schulz approximation of U V^T for [..., M, N], in bf16."""
    x: Tensor = update.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT.contiguous()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


class Optimizer:
    """`step(scale)` applies one update with both learning rates times `scale`."""

    def __init__(self, network: nn.Module, *, muon_lr: float, adam_lr: float) -> None:
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        self.params = dict(network.named_parameters())
        self.state: dict[str, Tensor] = {"steps": torch.zeros((), dtype=torch.int64)}
        for name, p in self.params.items():
            self.state[f"first.{name}"] = torch.zeros_like(p)
            if self._is_adam(name):
                self.state[f"second.{name}"] = torch.zeros_like(p)

    @staticmethod
    def _is_adam(name: str) -> bool:
        return any(part in name for part in _ADAM_NAMES)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        self.state["steps"] += 1
        count = int(self.state["steps"])
        for name, p in self.params.items():
            assert p.grad is not None, f"no gradient reached {name}"
            first = self.state[f"first.{name}"]
            if self._is_adam(name):
                second = self.state[f"second.{name}"]
                first.lerp_(p.grad, 0.1)
                second.mul_(0.95).addcmul_(p.grad, p.grad, value=0.05)
                denominator = (second / (1 - 0.95**count)).sqrt_().add_(1e-10)
                p.addcdiv_(first, denominator, value=-self.adam_lr * scale / (1 - 0.9**count))
            else:
                first.lerp_(p.grad, 0.05)
                update = orthogonalize(p.grad.lerp(first, 0.95)).to(p.dtype)
                shape_scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - 0.01 * self.muon_lr * scale)
                p.add_(update, alpha=-self.muon_lr * scale * shape_scale)
            p.grad = None


_LN2 = float(np.log(2.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of the training. Times are seconds of training, summed over resumed runs."""

    budget_s: float
    batch_tokens: int = 8192
    context: int = 512
    full_context: int = 2048
    full_context_from: float = 0.88  # fraction of the budget
    warmup_steps: int = 40
    decay_from: float = 0.5  # fraction of the budget
    balance_weight: float = 0.05
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    chat_s: float = 0.0  # the chat phase, after the budget
    chat_context: int = 1024
    chat_scale: float = 0.15  # of both learning rates, at its start
    seed: int = 20261120


@dataclass(frozen=True, slots=True)
class Tokens:
    """The training tokens as one stream, and the validation tokens with their bytes by domain."""

    train: np.ndarray
    valid: dict[str, np.ndarray]
    valid_bytes: dict[str, int]


def prepare_tokens(corpus_root: Path, work: Path, shape: Shape, seed: int) -> Tokens:
    """Tokenizes the texts into `work` once, and reads them from there afterwards."""
    tokenizer_path, stream_path = work / "tokenizer.json", work / "train.npy"
    rng = random.Random(seed)
    if not stream_path.exists():
        corpus = Corpus.read(corpus_root, "train")
        if not tokenizer_path.exists():
            sample = [t for d in DOMAINS for t in corpus.documents[d] if rng.random() < 0.5]
            train_tokenizer(sample, shape.vocab_size, tokenizer_path)
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
        np.save(
            stream_path, encode_documents(tokenizer, training_texts(corpus, random.Random(seed)))
        )
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    valid = Corpus.read(corpus_root, "valid").documents
    return Tokens(
        np.load(stream_path, mmap_mode="r"),
        {d: encode_documents(tokenizer, valid[d]) for d in DOMAINS},
        {d: sum(len(t.encode()) for t in valid[d]) for d in DOMAINS},
    )


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Returns all documents as one uint16 stream, each closed by <|endoftext|>."""
    pieces = []
    for start in range(0, len(texts), 512):
        batch = texts[start : start + 512]
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            pieces.append(np.asarray([*encoding.ids, END_OF_TEXT_ID], dtype=np.uint16))
    return np.concatenate(pieces)


class Batches:
    """Yields windows of the stream, each once per epoch, in an order that depends on the seed."""

    def __init__(self, stream: np.ndarray, seed: int) -> None:
        self.stream, self.rng = stream, np.random.default_rng(seed)
        self.order: list[int] = []

    def draw(self, batch_tokens: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = []
        for _ in range(batch_tokens // context):
            if not self.order:
                self.order = self.rng.permutation((len(self.stream) - context - 1) // 512).tolist()
            start = min(self.order.pop() * 512, len(self.stream) - context - 1)
            rows.append(self.stream[start : start + context + 1].astype(np.int64))
        ids = torch.from_numpy(np.stack(rows))
        return ids[:, :-1], ids[:, 1:]


@torch.no_grad()
def bits_per_byte(network: Network, tokens: Tokens, context: int, limit: int) -> dict[str, float]:
    """Returns the valid bits per byte by domain, for consecutive windows of `context` and at most
    `limit` tokens each.

    The first token of a window has no context and costs log2(V).
    """
    result = {}
    uniform_nats = float(np.log(network.shape.vocab_size))
    for domain, stream in tokens.valid.items():
        used = min(len(stream), limit) // context * context
        windows = torch.from_numpy(stream[:used].astype(np.int64)).view(-1, context)
        nats = 0.0
        for rows in torch.split(windows, 16):
            loss, _, _ = network.loss(rows[:, :-1], rows[:, 1:])
            nats += float(loss) * rows[:, 1:].numel() + len(rows) * uniform_nats
        share = used / len(stream)
        result[domain] = nats / _LN2 / (tokens.valid_bytes[domain] * share)
    return result


def learning_rate_scale(recipe: Recipe, step: int, progress: float) -> float:
    """Returns 1 between warm-up and `decay_from`, then falls linearly to 0 at the end of the
    budget."""
    warmup = min(1.0, (step + 1) / recipe.warmup_steps)
    decay = min(1.0, (1.0 - progress) / (1.0 - recipe.decay_from))
    return max(0.0, min(warmup, decay))


def train(corpus_root: Path, work: Path, shape: Shape, recipe: Recipe) -> Network:
    """Trains until the budget is spent; resumes from `work/checkpoint.safetensors` if it exists."""
    work.mkdir(parents=True, exist_ok=True)
    tokens = prepare_tokens(corpus_root, work, shape, recipe.seed)
    torch.manual_seed(recipe.seed)
    network = Network(shape)
    optimizer = Optimizer(network, muon_lr=recipe.muon_lr, adam_lr=recipe.adam_lr)
    checkpoint = work / "checkpoint.safetensors"
    spent = _restore(checkpoint, network, optimizer) if checkpoint.exists() else 0.0
    if spent >= recipe.budget_s:
        return network  # an earlier run finished this phase
    batches = Batches(tokens.train, recipe.seed + int(optimizer.state["steps"]))
    log = (work / "log.jsonl").open("a")
    clock = time.monotonic()
    while spent < recipe.budget_s:
        progress, step = spent / recipe.budget_s, int(optimizer.state["steps"])
        context = recipe.full_context if progress > recipe.full_context_from else recipe.context
        ids, targets = batches.draw(recipe.batch_tokens, context)
        loss, balance, expert_ids = network.loss(ids, targets)
        torch.autograd.backward(loss + recipe.balance_weight * balance)
        optimizer.step(learning_rate_scale(recipe, step, progress))
        now = time.monotonic()
        spent, clock = spent + now - clock, now
        if step % 10 == 0:
            counts = [i.flatten().bincount(minlength=shape.num_experts) for i in expert_ids]
            share = [float(c.min()) / float(c.float().mean()) for c in counts]
            _write(
                log,
                step=step,
                spent=round(spent, 1),
                loss=loss.item(),
                balance=balance.item(),
                least_used=min(share),
                context=context,
            )
        if step % 150 == 149:
            _write(log, step=step, valid=bits_per_byte(network, tokens, context, 16_384))
            _save(checkpoint, network, optimizer, spent)
    _save(checkpoint, network, optimizer, spent)
    _write(
        log,
        step=int(optimizer.state["steps"]),
        spent=spent,
        valid=bits_per_byte(network, tokens, recipe.full_context, 10**9),
    )
    log.close()
    return network


def tune_chat(corpus_root: Path, work: Path, shape: Shape, recipe: Recipe) -> None:
    """Trains the last phase, after `train`: mostly chats, at a low and falling learning rate.

    Resumes like `train`: the time spent beyond `budget_s` is this phase's.
    """
    tokens = prepare_tokens(corpus_root, work, shape, recipe.seed)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    texts = chat_tuning_texts(Corpus.read(corpus_root, "train"), random.Random(recipe.seed))
    network = Network(shape)
    optimizer = Optimizer(network, muon_lr=recipe.muon_lr, adam_lr=recipe.adam_lr)
    checkpoint = work / "checkpoint.safetensors"
    spent = _restore(checkpoint, network, optimizer)
    batches = Batches(encode_documents(tokenizer, texts), recipe.seed)
    clock = time.monotonic()
    with (work / "log.jsonl").open("a") as log:
        while (progress := (spent - recipe.budget_s) / max(recipe.chat_s, 1e-9)) < 1.0:
            ids, targets = batches.draw(recipe.batch_tokens, recipe.chat_context)
            loss, balance, _ = network.loss(ids, targets)
            torch.autograd.backward(loss + recipe.balance_weight * balance)
            optimizer.step(recipe.chat_scale * (1.0 - max(0.0, progress)))
            now = time.monotonic()
            spent, clock = spent + now - clock, now
            step = int(optimizer.state["steps"])
            _write(log, step=step, spent=round(spent, 1), chat_loss=loss.item())
        _save(checkpoint, network, optimizer, spent)
        _write(
            log,
            step=int(optimizer.state["steps"]),
            spent=spent,
            valid=bits_per_byte(network, tokens, recipe.full_context, 10**9),
        )


def _write(log, **fields: object) -> None:  # type: ignore[no-untyped-def]
    log.write(json.dumps(fields) + "\n")
    log.flush()


def _save(path: Path, network: Network, optimizer: Optimizer, spent: float) -> None:
    tensors = {f"weight.{k}": v for k, v in network.state_dict().items()}
    tensors |= {f"optimizer.{k}": v for k, v in optimizer.state.items()}
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, {"spent": repr(spent)})
    temporary.replace(path)


def _restore(path: Path, network: Network, optimizer: Optimizer) -> float:
    tensors = load_file(path)
    weights = {k.removeprefix("weight."): v for k, v in tensors.items() if k.startswith("weight.")}
    network.load_state_dict(weights)
    for key in optimizer.state:
        optimizer.state[key].copy_(tensors[f"optimizer.{key}"])
    with safe_open(path, "pt") as file:
        return float(file.metadata()["spent"])


__all__ = [
    "IM_END_ID",
    "Batches",
    "Recipe",
    "Tokens",
    "bits_per_byte",
    "prepare_tokens",
    "train",
    "tune_chat",
]
