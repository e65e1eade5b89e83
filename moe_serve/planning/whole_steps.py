"""Measures whole steps of an engine that reads prompts and writes answers, and fits their time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch

from moe_serve.clock import Clock
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.execute.step_outcome import StepOutcome
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.costs.cost_model import Experts
from moe_serve.pipeline.costs.step_costs import BatchLoad
from moe_serve.pipeline.costs.whole_step import WholeStep, whole_step_terms
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.stacked_layers import StackedLayers
from moe_serve.pipeline.transport import LocalTransport
from moe_serve.planning.measure import Fit, fit
from moe_serve.planning.measured_model import MeasuredModel
from moe_serve.planning.natural_steps import measured_engine

_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # requests in progress
_PROMPTS, _ANSWERS = ((8, 64), (64, 1024)), (4, 64)  # tokens, from and to
_MOST_ROWS = 1024  # of a step, as in the server's defaults
_SCATTER_STEPS = 33
_MOST_SCATTER = 2.0  # of measured over predicted times
_NUM_FITS = 3  # each with the times that the one before predicts


@dataclass(frozen=True, slots=True)
class StepSample:
    """A step of prompts and answers. `load`: of the busiest attention rank; `num_other_rows`: those
    of other attention ranks."""

    load: BatchLoad
    seconds: float
    num_other_rows: int = 0

    @property
    def num_routed(self) -> int:
        """Rows of all attention ranks."""
        return self.load.num_rows + self.num_other_rows


class NotingExecutor(LocalExecutor):
    """Notes the load of the last step."""

    load = BatchLoad.decode(0, 0)

    def run(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> StepOutcome:
        self.load = BatchLoad.of(plan.slices)
        return super().run(plan, sequences)


def one_call_pipeline(model: MeasuredModel) -> Pipeline:
    """Builds the pipeline that a server of one process has."""
    pipeline = Pipeline(model.attention, LocalTransport(model.experts), model.cache, model.device)
    pipeline.stacked = StackedLayers.of(model.attention, model.experts, model.cache)
    return pipeline


def whole_steps(
    model: MeasuredModel, budget_s: float, clock: Clock = time.perf_counter
) -> list[StepSample]:
    """Serves random requests in closed loops of several sizes, each first with short prompts and
    then with long ones, about `budget_s` seconds together -> all steps but the first of each loop.

    With prompts of one kind, more sequences would always mean more cached tokens, and a fit could
    not tell what either costs.
    """
    samples: list[StepSample] = []
    requests = RandomRequests(model.spec.vocab_size, model.max_context)
    sampler = Sampler(frozenset(model.spec.eos_token_ids))
    for most in _BATCHES:
        executor = NotingExecutor(one_call_pipeline(model), sampler)
        config = SchedulerConfig(max_num_seqs=most, max_batched_tokens=_MOST_ROWS)
        engine = measured_engine(executor, model, config)
        for is_long in (False, True):
            found, until = list[StepSample](), clock() + budget_s / 2
            while clock() < until or len(found) < 3:
                while engine.num_running + engine.num_waiting < most:
                    engine.add(requests.next(is_long))
                start = clock()
                engine.step()
                found.append(StepSample(executor.load, clock() - start))
            samples += found[1:]
    return samples


class RandomRequests:
    """Makes requests whose prompts have lengths that are even on a logarithmic scale, always the
    same ones."""

    def __init__(self, vocab_size: int, max_context: int) -> None:
        self._vocab_size, self._longest = vocab_size, max(1, max_context // 2)
        self._generator = torch.Generator().manual_seed(7)
        self._num_made = 0

    def next(self, is_long: bool) -> GenerationRequest:
        """Returns the next request."""
        generator = self._generator
        low, high = (min(each, self._longest) for each in _PROMPTS[is_long])
        share = float(torch.rand(1, generator=generator))
        count = round(low * (high / low) ** share)
        prompt = torch.randint(self._vocab_size, (count,), generator=generator).tolist()
        num_output = int(torch.randint(_ANSWERS[0], _ANSWERS[1] + 1, (1,), generator=generator))
        number, self._num_made = self._num_made, self._num_made + 1
        params = SamplingParams(
            max_tokens=num_output, temperature=1.0, seed=number, ignore_eos=True
        )
        return GenerationRequest(
            request_id=f"calibrate-{number}",
            prompt_token_ids=tuple(int(t) for t in prompt),
            params=params,
        )


def fit_whole_steps(experts: Experts, samples: Items[StepSample]) -> tuple[WholeStep, Fit]:
    """Fits the steps. Those that took more than twice what a first fit predicts are left out, as
    other programs slowed them, and the scatter has the quantiles of the others.

    Steps weigh by their seconds: a loop of short steps has many more of them than one of long
    steps, and both took the same time. A deviation counts relative to the predicted time: relative
    to the measured one, a slow step would count less than a fast one, and short steps, which
    scatter most, would be predicted too short.
    """
    columns = np.array([_terms(experts, sample) for sample in samples], dtype=np.float64)
    seconds = np.array([sample.seconds for sample in samples])
    found = fit(columns, seconds, seconds)
    for _ in range(_NUM_FITS):
        predicted = columns @ np.array(found.coefficients)
        usual = seconds <= _MOST_SCATTER * predicted
        columns, seconds, predicted = columns[usual], seconds[usual], predicted[usual]
        found = fit(columns, seconds, seconds**2 / predicted)
    alpha_s, row_s, kv_token_s, pair_s, expert_s, sequence_s, *few_rows_s = found.coefficients
    ratios = 1 / (1 + np.array(found.errors))
    scatter = np.quantile(ratios, np.linspace(0, 1, _SCATTER_STEPS)).tolist()
    whole = WholeStep(
        alpha_s=alpha_s,
        row_s=row_s,
        kv_token_s=kv_token_s,
        pair_s=pair_s,
        expert_s=expert_s,
        sequence_s=sequence_s,
        few_rows_s=tuple(few_rows_s),
        scatter=tuple(scatter),
    )
    return whole, found


def _terms(experts: Experts, sample: StepSample) -> tuple[float, ...]:
    return whole_step_terms(sample.load, experts.num_activated(sample.num_routed))
