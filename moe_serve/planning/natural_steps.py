"""Runs steps of the real engine on text that the model writes itself.

They give two things that random numbers cannot: the rows that the true router sends to the experts,
and the cost of a step beside its layers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.expert_stage import ExpertStage, RoutedRows
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.model.stage.attention_stage import Routed
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.transport import LocalTransport
from moe_serve.planning.measure import usual
from moe_serve.planning.measured_model import MeasuredModel

_PROMPT_TOKENS = 8
_BUDGET_S = 4.0  # for the steps of one batch, if the model's steps are long


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """A decode step of `num_sequences` with about `context` tokens each."""

    num_sequences: int
    context: int
    seconds: float


class RecordingTransport(LocalTransport):
    """Keeps the rows that the router sends, by layer."""

    def __init__(self, stage: ExpertStage) -> None:
        super().__init__(stage)
        self.rows: dict[int, list[RoutedRows]] = {}

    def dispatch(self, layer: int, micro_batch: int, routed: Routed) -> None:
        self.rows.setdefault(layer, []).append(routed.rows)
        super().dispatch(layer, micro_batch, routed)


def decode_steps(
    model: MeasuredModel,
    num_sequences: int,
    num_steps: int,
    transport: LocalTransport,
    temperature: float,
) -> DecodeSample:
    """Reads prompts of random tokens, then samples up to `num_steps` tokens for each."""
    engine = _engine(model, num_sequences, transport)
    params = SamplingParams(
        max_tokens=num_steps + 2, temperature=temperature, seed=1, ignore_eos=True
    )
    generator = torch.Generator().manual_seed(num_sequences)
    for index in range(num_sequences):
        prompt = torch.randint(model.spec.vocab_size, (_PROMPT_TOKENS,), generator=generator)
        tokens = tuple(int(token) for token in prompt.tolist())
        engine.add(GenerationRequest(request_id=str(index), prompt_token_ids=tokens, params=params))
    engine.step()
    if isinstance(transport, RecordingTransport):
        transport.rows.clear()  # drops the prompts' rows
    times: list[float] = []
    while len(times) < num_steps and (len(times) < 2 or sum(times) < _BUDGET_S):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    context = _PROMPT_TOKENS + 1 + len(times) // 2
    return DecodeSample(num_sequences, context, usual(times))


def natural_rows(model: MeasuredModel, num_sequences: int, num_steps: int) -> dict[int, RoutedRows]:
    """Returns the rows of decode steps by sparse layer; neighbours are rows of different
    sequences."""
    transport = RecordingTransport(model.experts)
    decode_steps(model, num_sequences, num_steps, transport, temperature=1.0)
    return {layer: _joined(rows) for layer, rows in transport.rows.items()}


def _joined(rows: list[RoutedRows]) -> RoutedRows:
    def join(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    return RoutedRows(
        join([r.x_TD for r in rows]),
        join([r.expert_ids_TK for r in rows]),
        join([r.weights_TK for r in rows]),
    )


def _engine(model: MeasuredModel, num_sequences: int, transport: LocalTransport) -> Engine:
    pipeline = Pipeline(model.attention, transport, model.cache, model.device)
    executor = LocalExecutor(pipeline, Sampler(frozenset(model.spec.eos_token_ids)))
    config = SchedulerConfig(
        max_num_seqs=num_sequences,
        max_batched_tokens=max(1, num_sequences * _PROMPT_TOKENS),
        max_queued_requests=num_sequences,
    )
    return measured_engine(executor, model, config)


def measured_engine(
    executor: LocalExecutor, model: MeasuredModel, scheduler: SchedulerConfig
) -> Engine:
    """Builds an engine over a measured model, without shared prefixes."""
    return Engine(
        executor,
        scheduler=scheduler,
        num_pages=model.cache.num_pages,
        page_size=model.cache.page_size,
        micro_batches=1,
        max_model_len=model.max_context,
        eos_token_ids=frozenset(model.spec.eos_token_ids),
        has_prefix_cache=False,
    )
