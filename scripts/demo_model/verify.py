"""Checks with transformers that the exported folder contains the trained network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .corpus import DOMAINS, Corpus, render_chat
from .network import Network

_TOLERANCE_NATS = 0.02  # the network computes in bf16, transformers here in fp32
_CHAT = [("What is 17 + 25?", "17 + 25 = 42"), ("Why?", "Seven and five are twelve.")]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The loss of both in nats per token on the same tokens, and two checks of the folder."""

    num_tokens: int
    network_loss: float
    hf_loss: float
    hf_bf16_loss: float
    largest_logit: float
    is_chat_equal: bool

    @property
    def is_close(self) -> bool:
        losses = (self.hf_loss, self.hf_bf16_loss)
        is_same = all(abs(loss - self.network_loss) < _TOLERANCE_NATS for loss in losses)
        return is_same and self.is_chat_equal and self.largest_logit < 100

    def describe(self) -> str:
        return (
            f"loss over {self.num_tokens} tokens: trained network {self.network_loss:.4f}, "
            f"transformers fp32 {self.hf_loss:.4f}, bf16 {self.hf_bf16_loss:.4f}; "
            f"largest logit {self.largest_logit:.1f}; "
            f"chat template {'equal' if self.is_chat_equal else 'DIFFERS'}; "
            f"{'ok' if self.is_close else f'MORE than {_TOLERANCE_NATS} apart'}"
        )


def sample_text(corpus_root: Path | None) -> str:
    """Returns two valid documents of each domain, cut to 1000 characters; without a corpus, a
    chat."""
    if corpus_root is None:
        return render_chat(_CHAT)
    documents = Corpus.read(corpus_root, "valid").documents
    return "\n".join(text[:1000] for d in DOMAINS for text in documents[d][:2])


@torch.no_grad()
def compare_with_transformers(folder: Path, network: Network, text: str) -> Comparison:
    """Runs `text` through the network and through transformers on the exported folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    windows = [w for w in torch.split(ids, network.shape.max_positions) if len(w) > 1]
    network_loss = _mean([float(network.loss(w[None, :-1], w[None, 1:])[0]) for w in windows])
    losses, largest = {}, 0.0
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        logits = [model(w[None, :-1]).logits[0].float() for w in windows]
        losses[dtype] = _mean([_loss(z, w[1:]) for z, w in zip(logits, windows, strict=True)])
        largest = max(largest, *(float(z.abs().max()) for z in logits))
    messages = [
        {"role": role, "content": content}
        for turn in _CHAT
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    is_chat_equal = tokenizer.apply_chat_template(messages, tokenize=False) == render_chat(_CHAT)
    return Comparison(
        num_tokens=sum(len(w) - 1 for w in windows),
        network_loss=network_loss,
        hf_loss=losses[torch.float32],
        hf_bf16_loss=losses[torch.bfloat16],
        largest_logit=largest,
        is_chat_equal=is_chat_equal,
    )


def _loss(logits_TV: Tensor, targets_T: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits_TV, targets_T))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
