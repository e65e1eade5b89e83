"""Fits the scales of a BitDelta adapter to texts, BitDelta's second step (Liu et al., 2024).

A scale starts as the mean magnitude of a matrix's differences, which approximates the weights best,
but not the predictions. This module fits factors of all scales by Adam, so that the adapter
predicts the tokens that the fine-tune predicts. Signs and full tensors stay as they are.

T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.interface.sign_matrix import SignMatrix
from moe_kernels.reference.gradient_kernels import FittedScales
from moe_serve.adapters.adapter_files import AdapterFiles
from moe_serve.adapters.adapter_part import WHOLE, LiveModel
from moe_serve.adapters.bitdelta.bitdelta_builder import BitDeltaBuilder
from moe_serve.adapters.bitdelta.tensors import SCALE, BitDeltaTensors
from moe_serve.adapters.bitdelta.whole_texts import (
    WholeTexts,
    gradient_loader,
    open_adapted,
    open_model,
)
from moe_serve.adapters.load_rests import LoadRests
from moe_serve.adapters.targets import AdaptedMatrix, AdapterTargets

Tokens = NDArray[np.int64]
Progress = Callable[[int, int], None]
_TEXTS_OF_STEP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilTexts:
    """Texts for the fit and held-out texts for the measurement, as tokens."""

    fitted: Sequence[Tokens]
    held_out: Sequence[Tokens]

    @property
    def longest(self) -> int:
        """The number of tokens of the longest text."""
        return max(len(tokens) for tokens in (*self.fitted, *self.held_out))


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilRecipe:
    """The settings of the fit. `rate`: the initial learning rate of the factors, which falls to
    0."""

    num_steps: int = 100
    rate: float = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFit:
    """The quality of an adapter on held-out texts: its divergence from the fine-tune, in nats per
    token, and its perplexity."""

    divergence: float
    perplexity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Distilled:
    """The fitted scales by module name, and the quality before and after the fit. If the divergence
    on held-out texts did not fall (`is_better` is False), these are the original scales."""

    scales: Mapping[str, Tensor]
    before: TextFit
    after: TextFit
    tuned_perplexity: float

    @property
    def is_better(self) -> bool:
        return self.after.divergence < self.before.divergence


@dataclass(frozen=True, slots=True)
class _PlacedTensors(BitDeltaTensors):
    """An adapter whose scales are indices into the vector of fitted scales."""

    places: Mapping[AdaptedMatrix, Tensor]

    def matrix(self, target: AdaptedMatrix) -> SignMatrix | None:
        matrix = BitDeltaTensors.matrix(self, target)  # super() fails in classes with slots
        return None if matrix is None else replace(matrix, scales_N=self.places[target])


def distil(
    base: Path,
    tuned: Path,
    files: AdapterFiles,
    texts: DistilTexts,
    recipe: DistilRecipe,
    progress: Progress | None = None,
) -> Distilled:
    """Fits an adapter's scales. Both models are in memory, in fp32."""
    first = [torch.zeros(1)]
    loader = gradient_loader(base, FittedScales(first[0], torch.ones(1)))
    read = BitDeltaBuilder(loader, AdapterTargets(loader), WHOLE, LiveModel(), LoadRests()).read(
        files
    )
    places, count = dict[AdaptedMatrix, Tensor](), 1
    for target, module in read.signs.items():
        own = files.read(module + SCALE).float().flatten()
        places[target] = torch.arange(count, count + len(own), dtype=torch.float64)
        first.append(own)
        count += len(own)
    scales = FittedScales(torch.cat(first), torch.ones(count, requires_grad=True))
    student = _student(base, scales, read, places, texts.longest)
    teacher = open_model(tuned, texts.longest)
    before, tuned_perplexity = _measured(student, teacher, texts.held_out)
    _fit(student, teacher, scales.factors, texts.fitted, recipe, progress)
    after, _ = _measured(student, teacher, texts.held_out)
    fitted = scales
    if not after.divergence < before.divergence:
        fitted = FittedScales(scales.first, torch.ones(count))
    return Distilled(
        scales={m: fitted.at(places[t].long()).detach() for t, m in read.signs.items()},
        before=before,
        after=after,
        tuned_perplexity=tuned_perplexity,
    )


def _student(
    base: Path,
    scales: FittedScales,
    read: BitDeltaTensors,
    places: Mapping[AdaptedMatrix, Tensor],
    longest: int,
) -> WholeTexts:
    tensors = _PlacedTensors(read.files, read.signs, read.full, places)
    return open_adapted(gradient_loader(base, scales), tensors, longest)


def _fit(
    student: WholeTexts,
    teacher: WholeTexts,
    factors: Tensor,
    texts: Sequence[Tokens],
    recipe: DistilRecipe,
    progress: Progress | None,
) -> None:
    adam = torch.optim.Adam([factors], lr=recipe.rate)
    for step in range(recipe.num_steps):
        rate = recipe.rate * 0.5 * (1.0 + math.cos(math.pi * step / recipe.num_steps))
        adam.param_groups[0]["lr"] = rate
        some = [
            texts[i % len(texts)] for i in range(step * _TEXTS_OF_STEP, (step + 1) * _TEXTS_OF_STEP)
        ]
        with torch.no_grad():
            wanted_TV = F.log_softmax(teacher.logits(some), dim=-1)
        adam.zero_grad()
        _divergence(student.logits(some), wanted_TV).backward()
        adam.step()
        if progress is not None:
            progress(step + 1, recipe.num_steps)


def _divergence(logits_TV: Tensor, wanted_TV: Tensor) -> Tensor:
    """Returns the mean Kullback-Leibler divergence of the tokens' distributions."""
    own_TV = F.log_softmax(logits_TV, dim=-1)
    return F.kl_div(own_TV, wanted_TV, reduction="batchmean", log_target=True)


@torch.no_grad()
def _measured(
    student: WholeTexts, teacher: WholeTexts, texts: Sequence[Tokens]
) -> tuple[TextFit, float]:
    """Returns the adapter's fit to held-out texts, and the fine-tune's perplexity."""
    sums, num_tokens, num_predicted = [0.0, 0.0, 0.0], 0, 0
    for tokens in texts:
        logits = [model.logits([tokens]) for model in (student, teacher)]
        own_TV, wanted_TV = (F.log_softmax(each, dim=-1) for each in logits)
        sums[0] += float(_divergence(logits[0], wanted_TV)) * len(tokens)
        following = torch.from_numpy(tokens[1:])
        for place, each in ((1, own_TV), (2, wanted_TV)):
            sums[place] += float(F.nll_loss(each[:-1].cpu(), following, reduction="sum"))
        num_tokens += len(tokens)
        num_predicted += len(tokens) - 1
    own, wanted = (math.exp(each / num_predicted) for each in sums[1:])
    return TextFit(divergence=sums[0] / num_tokens, perplexity=own), wanted
