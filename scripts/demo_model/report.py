"""Renders docs/measured/demo-model.md: the figures of the exported model and how it was made.

The samples are answers of the exported model to fixed prompts, unedited, through transformers in
fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .corpus import END_OF_TEXT_ID, IM_END_ID, render_chat
from .evaluation import MIN_GAIN, REFERENCE_TRIGRAM, DomainScore, ExpertUse
from .export import num_parameters
from .network import Shape
from .plots import TrainingLog
from .training import Recipe

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
_TEMPLATE = Path(__file__).with_name("report_template.md")
_LIMIT_NOTE = "*(stopped by the limit)*"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The figures of the report."""

    shape: Shape
    recipe: Recipe
    num_steps: int
    train_seconds: float
    num_stream_tokens: int  # in one pass over the training text
    hardware: str
    size_bytes: int
    scores: list[DomainScore]
    use: ExpertUse
    samples: list[Sample]
    log: TrainingLog


def render_report(findings: Findings) -> str:
    """Returns the Markdown text."""
    shape, recipe = findings.shape, findings.recipe
    total, active = num_parameters(shape)
    num_tokens = findings.num_steps * recipe.batch_tokens
    near, far = findings.use.closest_and_farthest()
    return _TEMPLATE.read_text(encoding="utf-8").format(
        shape=shape,
        recipe=recipe,
        params_m=total / 1e6,
        active_m=active / 1e6,
        size_mib=findings.size_bytes / 2**20,
        hardware=findings.hardware,
        minutes=findings.train_seconds / 60,
        num_steps=findings.num_steps,
        tokens_m=num_tokens / 1e6,
        passes=num_tokens / findings.num_stream_tokens,
        tokens_per_s=num_tokens / findings.train_seconds,
        full_context_share=100 * (1 - recipe.full_context_from),
        decay_share=100 * recipe.decay_from,
        min_gain=100 * MIN_GAIN,
        score_rows=_score_rows(findings.scores),
        flattening=_flattening(findings.log),
        use_rows=_use_rows(findings.use),
        top_even=100 * shape.top_k / shape.num_experts,
        near=f"{near[0]} and {near[1]} ({near[2]:.2f})",
        far=f"{far[0]} and {far[1]} ({far[2]:.2f})",
        temperature=TEMPERATURE,
        top_p=TOP_P,
        seed=SEED,
        endings=_endings(findings.samples),
        samples="\n".join(_sample(s) for s in findings.samples),
    )


def _score_rows(scores: list[DomainScore]) -> str:
    rows = [
        f"| {s.domain} | {s.num_bytes:,} | {s.num_tokens:,} | **{s.model:.3f}** | {s.trigram:.3f} "
        f"| {REFERENCE_TRIGRAM[s.domain]:.2f} | {100 * s.gain:.1f}% |"
        for s in scores
    ]
    return "\n".join(rows)


def _flattening(log: TrainingLog) -> str:
    """Returns the last validations as text; empty if there are fewer than two."""
    points = log.mean_valid(last=6)
    if len(points) < 2:
        return ""
    path = ", ".join(f"{bits:.3f} (step {step})" for step, bits in points)
    return f"The mean over domains while training, at its last validations: {path}."


def _use_rows(use: ExpertUse) -> str:
    rows = [
        f"| {i} | {u.information_bits:.2f} | {100 * u.top_share:.0f}% | {u.distance:.2f} "
        f"| {u.least_used:.2f} | {u.most_used:.2f} | {u.num_nearly_dead} | {u.num_dead} |"
        for i, u in enumerate(use.layers())
    ]
    return "\n".join(rows)


def _endings(samples: list[Sample]) -> str:
    answers = [a for s in samples if s.title == CHAT for a in (s.greedy, s.sampled)]
    return f"{sum(a.has_ended for a in answers)} of {len(answers)}"


def _sample(sample: Sample) -> str:
    parts = [f"### {sample.title}\n", _block(sample.prompt)]
    for name, answer in (("greedy", sample.greedy), ("sampled", sample.sampled)):
        parts.append(f"{name}: {_ending(sample, answer)}\n")
        parts.append(_block(answer.text))
    return "\n".join(parts)


def _ending(sample: Sample, answer: Answer) -> str:
    if not answer.has_ended:
        return _LIMIT_NOTE
    return "ended with " + ("`<|im_end|>`" if sample.title == CHAT else "an end token")


def _block(text: str) -> str:
    """Returns indented code, which shows any text unchanged, fences included."""
    lines = text.splitlines() or [""]
    return "\n".join(f"    {line}".rstrip() for line in lines) + "\n"
