"""Renders docs/measured/demo-model.md: the figures of the exported model and how it was made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .evaluation import MIN_GAIN, REFERENCE_TRIGRAM, DomainScore, ExpertUse
from .export import num_parameters
from .network import Shape
from .plots import TrainingLog
from .samples import CHAT, SEED, TEMPERATURE, TOP_P, Answer, Sample
from .training import Recipe

_TEMPLATE = Path(__file__).with_name("report_template.md")
_LIMIT_NOTE = "*(stopped by the limit)*"


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
