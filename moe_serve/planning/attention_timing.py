"""T_a: one layer's attention stage, over rows and contexts, decode steps and chunks of prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moe_serve.config.sections import PAGE_SIZE
from moe_serve.model.stage.step_inputs import StepInputs, make_step_inputs
from moe_serve.model.step_plan import MicroBatch, SequenceSlice
from moe_serve.pipeline.costs.batch_load import BatchLoad
from moe_serve.planning.measured_model import LayerKind, MeasuredModel
from moe_serve.planning.stopwatch import Stopwatch

_DECODE = tuple((n, c) for n in (1, 2, 4, 8, 16, 32, 64, 128) for c in (64, 512, 2048))
_QUICK_DECODE = tuple((n, c) for n in (1, 4, 16, 64) for c in (64, 512))
_CHUNKS = tuple((n, start) for n in (32, 128, 512) for start in (0, 512))
_QUICK_CHUNKS = ((128, 0), (256, 256))


@dataclass(frozen=True, slots=True)
class Case:
    """`num_sequences` that compute `num_rows` tokens each, after `start` cached ones."""

    num_sequences: int
    num_rows: int
    start: int

    @property
    def num_pages(self) -> int:
        """Of one sequence."""
        return -(-(self.start + self.num_rows) // PAGE_SIZE)


@dataclass(frozen=True, slots=True)
class AttentionSample:
    """Seconds of one layer."""

    load: BatchLoad
    seconds: float


def attention_cases(model: MeasuredModel, is_quick: bool) -> list[Case]:
    """Those of the grid that the model's context and this machine's memory can hold."""
    decode, chunks = (_QUICK_DECODE, _QUICK_CHUNKS) if is_quick else (_DECODE, _CHUNKS)
    cases = [Case(n, 1, min(context, model.max_context) - 1) for n, context in decode]
    cases += [Case(1, n, start) for n, start in chunks if start + n <= model.max_context]
    limit = model.cache.num_pages
    return [c for c in dict.fromkeys(cases) if c.num_sequences * c.num_pages <= limit]


@torch.inference_mode()
def time_attention(
    model: MeasuredModel, kind: LayerKind, case: Case, stopwatch: Stopwatch
) -> AttentionSample:
    """Layers of a kind in turn: norm, attention, router, shared expert, and the residual after."""
    slices = _slices(model, case)
    batch = MicroBatch(slices)
    inputs = make_step_inputs(batch, model.cache, model.spec, model.kernels, model.device)
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(batch.num_tokens, model.spec.width, generator=generator)
    hidden_TD = hidden_TD.to(device=model.device, dtype=model.dtype)
    sums_TD = torch.zeros(hidden_TD.shape, dtype=torch.float32, device=model.device)

    def layers() -> None:
        for layer in kind.measured:
            _one_layer(model, layer, hidden_TD, sums_TD, inputs)

    seconds = stopwatch.seconds(layers) / len(kind.measured)
    return AttentionSample(BatchLoad.of(slices), seconds)


def _one_layer(
    model: MeasuredModel,
    layer: int,
    hidden_TD: torch.Tensor,
    sums_TD: torch.Tensor,
    inputs: StepInputs,
) -> None:
    advance = model.attention.advance(layer, hidden_TD, inputs, model.cache)
    if advance.routed is not None:
        shared_TD = model.attention.shared(layer, advance.routed.x_TD)
        model.attention.add(advance.hidden_TD, sums_TD, shared_TD)


def _slices(model: MeasuredModel, case: Case) -> tuple[SequenceSlice, ...]:
    """Every sequence with pages of its own, as different requests have. Page 0 is the empty one."""
    tokens = np.arange(case.num_rows, dtype=np.int64) % model.spec.vocab_size
    return tuple(
        SequenceSlice(
            index,
            case.start,
            tokens,
            tuple(range(1 + index * case.num_pages, 1 + (index + 1) * case.num_pages)),
            1,
        )
        for index in range(case.num_sequences)
    )
