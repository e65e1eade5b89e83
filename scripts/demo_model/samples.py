"""Answers fixed prompts with the exported model, unedited, through transformers in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .corpus import render_chat
from .vocabulary import END_OF_TEXT_ID, IM_END_ID

TEXT_PROMPTS = {
    "stories": "It was a dark and stormy night, and the old captain",
    "encyclopedia": "The human immune system protects the body by",
    "math": "Question: Tom has 12 apples and gives 5 of them to Anna. How many are left?\nAnswer:",
    "code_python": "def read_lines(path):\n    ",
    "code_c": "static int buffer_grow(struct buffer *b, size_t n)\n{\n",
    "french": "Le comte se leva, prit son chapeau et",
    "german_law": "§ 12\nDie zuständige Behörde kann",
}
CHAT_PROMPTS = (
    "What is 17 + 25?",
    "Solve 3*x + 4 = 19 for x.",
    "A box holds 6 eggs. How many eggs are in 4 boxes?",
    "Give three tips for staying healthy.",
    "Rewrite the sentence so that it is in the past tense: She walks to school.",
    "Write a short poem about the sea.",
)
TEMPERATURE, TOP_P, SEED = 0.7, 0.9, 7

CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Answer:
    """`has_ended`: by an end token, before the limit."""

    text: str
    has_ended: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt with its greedy and its sampled answer. `title` is a domain or CHAT."""

    title: str
    prompt: str
    greedy: Answer
    sampled: Answer


def generate_samples(folder: Path, num_text: int = 90, num_chat: int = 160) -> list[Sample]:
    """Answers all prompts; a text ends at <|endoftext|>, a chat at <|im_end|>."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ends = [IM_END_ID, END_OF_TEXT_ID]
    common = {"eos_token_id": ends, "pad_token_id": END_OF_TEXT_ID, "top_k": None}
    greedy = common | {"do_sample": False, "temperature": None, "top_p": None}
    sampled = common | {"do_sample": True, "temperature": TEMPERATURE, "top_p": TOP_P}

    def complete(ids: list[int], settings: dict[str, object], limit: int) -> Answer:
        torch.manual_seed(SEED)
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        (out,) = model.generate(prompt, attention_mask=mask, max_new_tokens=limit, **settings)
        answer = out[len(ids) :].tolist()
        text = str(tokenizer.decode(answer, skip_special_tokens=True))
        return Answer(text, has_ended=answer[-1] in ends)

    samples = []
    for title, prompt, ids in _prompts(tokenizer):
        limit = num_chat if title == CHAT else num_text
        answers = [complete(ids, settings, limit) for settings in (greedy, sampled)]
        samples.append(Sample(title, prompt, *answers))
    return samples


def _prompts(tokenizer: Any) -> Iterator[tuple[str, str, list[int]]]:
    """Yields the title, the prompt as shown, and the prompt as token ids."""
    for domain, text in TEXT_PROMPTS.items():
        yield domain, text, tokenizer(text).input_ids
    for text in CHAT_PROMPTS:
        rendered = render_chat([(text, "")]).removesuffix("<|im_end|>\n")
        yield CHAT, text, tokenizer(rendered).input_ids
