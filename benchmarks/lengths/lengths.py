"""Judges predictions of answer lengths on the demonstration model's own sampled answers.

    python benchmarks/run.py length_answers --corpus CORPUS --out answers.jsonl
    python benchmarks/run.py lengths answers.jsonl
    python benchmarks/run.py lengths answers.jsonl --deadlines      # and what they bring a queue

Every answer is predicted before it is known, then learnt from, so all prompts are new. Baselines: a
constant (the mean so far), the mean of the domain so far, max_tokens, and an oracle. Errors are of
answers that were not cut off.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from lengths.answers import Answer
from lengths.queue_gain import queue_gain
from lengths.stream import Embeddings, Streamed, kendall_tau, read_answers, stream

_WARM_UP = 500  # answers before the first that counts


def row_of(name: str, found: Sequence[Streamed]) -> tuple[str, ...]:
    later = [each for each in found[_WARM_UP:] if not each.is_cut]
    lengths = np.array([each.length for each in later], dtype=np.float64)
    p50 = np.array([each.p50 for each in later])
    error = float(np.abs(p50 - lengths).mean())
    of_domain = float(np.abs([e.domain_mean - e.length for e in later]).mean())
    every = found[_WARM_UP:]
    covered = np.mean([e.length <= round(e.p90) for e in every])
    tau = kendall_tau(p50, lengths)
    followed = np.mean([each.is_followed for each in every])
    ms = 1e3 * float(np.mean([each.seconds for each in every]))
    return (
        name, f"{tau:.3f}", f"{covered:.1%}", f"{error:.1f}", f"{error / of_domain:.2f}",
        f"{followed:.0%}", f"{ms:.2f}",
    )  # fmt: skip


def baselines(found: Sequence[Streamed]) -> list[tuple[str, ...]]:
    later = [each for each in found[_WARM_UP:] if not each.is_cut]
    lengths = np.array([each.length for each in later], dtype=np.float64)
    of_domain = np.array([each.domain_mean for each in later])
    rows: list[tuple[str, ...]] = []
    for name, predicted in (
        ("a constant", np.array([each.all_mean for each in later])),
        ("mean of the domain", of_domain),
        ("max_tokens", np.array([float(each.max_tokens) for each in later])),
        ("oracle", lengths),
    ):
        error = np.abs(predicted - lengths).mean()
        ratio = error / np.abs(of_domain - lengths).mean()
        tau = kendall_tau(predicted, lengths) if name != "a constant" else 0.0
        rows.append((name, f"{tau:.3f}", "", f"{error:.1f}", f"{ratio:.2f}", "", ""))
    return rows


def ceiling(answers: Sequence[Answer]) -> float | None:
    """Returns Kendall's tau of the lengths of two answers to the same prompt: how much of a length
    the prompt decides. None: no prompt was answered twice."""
    by_prompt: dict[tuple[int, ...], list[Answer]] = {}
    for answer in answers:
        by_prompt.setdefault(tuple(answer.prompt_ids), []).append(answer)
    pairs = [(p[0].num_tokens, p[1].num_tokens) for p in by_prompt.values() if len(p) > 1]
    if not pairs:
        return None
    first, second = np.array(pairs, dtype=np.float64).T
    return kendall_tau(first, second)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", type=Path, default=Path("moe_serve/demo_model"))
    parser.add_argument("--deadlines", action="store_true")
    arguments = parser.parse_args()
    answers, console = read_answers(arguments.answers), Console(width=130)
    embeddings = Embeddings(arguments.model)
    cut = np.mean([answer.is_cut for answer in answers])
    print(f"{len(answers)} answers, {cut:.1%} of them cut off; the first {_WARM_UP} do not count")
    table = Table("prediction", "tau", "within P90", "MAE", "over domain mean", "followed", "ms")
    streams = {
        "prompt only": stream(answers, knows_domain=False, embeddings=None),
        "prompt and its meaning": stream(answers, knows_domain=False, embeddings=embeddings),
        "domain and prompt": stream(answers, knows_domain=True, embeddings=None),
        "all three": stream(answers, knows_domain=True, embeddings=embeddings),
    }
    for name, (found, _) in streams.items():
        table.add_row(*row_of(name, found))
    for row in baselines(streams["all three"][0]):
        table.add_row(*row)
    console.print(table)
    if (tau := ceiling(answers)) is not None:
        print(f"two answers to the same prompt: tau {tau:.3f}")
    if arguments.deadlines:
        gains = Table("order", "known", "weighted tardiness, s", "share of the gap to the oracle")
        for gain in queue_gain(streams["all three"][0]):
            gains.add_row(*gain)
        console.print(gains)
    return 0
