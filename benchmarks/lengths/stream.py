"""Predicts answers one after another, each before it is known, and keeps the errors."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from lengths.answers import STOPS, Answer
from moe_serve.engine.service.lengths.features import RequestFacts
from moe_serve.engine.service.lengths.length_fit import HereFitter
from moe_serve.engine.service.lengths.length_predictor import LengthPredictor

CONTEXT = 2048
CONTENT = 24  # numbers that describe a prompt


def read_answers(path: Path, seed: int = 0) -> list[Answer]:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    answers = [Answer(**row) for row in rows]
    random.Random(seed).shuffle(answers)
    return answers


class Embeddings:
    """The mean of a prompt's embedding rows, turned to `CONTENT` directions in which the rows of
    the vocabulary differ most."""

    def __init__(self, model: Path) -> None:
        with safe_open(model / "model.safetensors", "pt") as file:
            rows_VD = file.get_tensor("model.embed_tokens.weight").float().numpy()
        centred = rows_VD - rows_VD.mean(axis=0)
        _, _, directions = np.linalg.svd(centred, full_matrices=False)
        self._rows_VC = centred @ directions[:CONTENT].T

    def of(self, prompt_ids: Sequence[int]) -> tuple[float, ...]:
        mean_C = self._rows_VC[np.asarray(prompt_ids)].mean(axis=0)
        return tuple(float(value) for value in mean_C)


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """One answer and what was predicted for it. `domain_mean`: the mean of the domain's answers
    before it; `seconds`: the CPU time of the prediction and of learning."""

    length: int
    is_cut: bool
    domain: str
    p50: float
    p90: float
    mean: float
    domain_mean: float
    all_mean: float
    max_tokens: int
    num_prompt: int
    is_followed: bool
    seconds: float


def stream(
    answers: Sequence[Answer], *, knows_domain: bool, embeddings: Embeddings | None
) -> tuple[list[Streamed], LengthPredictor]:
    """Predicts all answers in order. `knows_domain`: each domain is a tenant of its own."""
    predictor = LengthPredictor(CONTEXT, HereFitter())
    by_domain: defaultdict[str, list[int]] = defaultdict(list)
    every: list[int] = []
    found: list[Streamed] = []
    for index, answer in enumerate(answers):
        facts = RequestFacts(
            prompt_ids=answer.prompt_ids,
            max_tokens=answer.max_tokens,
            temperature=answer.temperature,
            has_stop=bool(STOPS[answer.domain]),
            tenant=answer.domain if knows_domain else "",
            content=() if embeddings is None else embeddings.of(answer.prompt_ids),
        )
        began, fits = time.process_time(), predictor.num_begun
        forecast = predictor.predict(str(index), facts)
        is_followed = predictor.is_followed
        seconds = time.process_time() - began
        began = time.process_time()
        predictor.ended(str(index), answer.num_tokens, is_cut=answer.is_cut)
        is_plain = predictor.num_begun == fits  # a server fits in another process
        seconds += time.process_time() - began if is_plain else 0.0
        own = by_domain[answer.domain]
        found.append(
            Streamed(
                length=answer.num_tokens,
                is_cut=answer.is_cut,
                domain=answer.domain,
                p50=min(forecast.p50, answer.max_tokens),
                p90=min(forecast.p90, answer.max_tokens),
                mean=min(forecast.followed.mean(), answer.max_tokens),
                domain_mean=float(np.mean(own)) if own else float(answer.max_tokens),
                all_mean=float(np.mean(every)) if every else float(answer.max_tokens),
                max_tokens=answer.max_tokens,
                num_prompt=len(answer.prompt_ids),
                is_followed=is_followed,
                seconds=seconds,
            )
        )
        own.append(answer.num_tokens)
        every.append(answer.num_tokens)
    return found, predictor


def kendall_tau(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Returns Kendall's tau-b: pairs in the same order less those in the other, without ties."""
    first, second = np.sign(a[:, None] - a[None]), np.sign(b[:, None] - b[None])
    both = float((first * second).sum())
    norm = np.sqrt(float((first != 0).sum()) * float((second != 0).sum()))
    return both / norm if norm else 0.0
