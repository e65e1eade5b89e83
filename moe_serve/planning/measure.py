"""Times one layer's attention stage (T_a) and expert stage (T_e) on this machine, and fits times.

Other programs can only make a call slower, so the lower quartile of the times counts: on a quiet
machine it is near the median, and on a busy one it is what the machine can do. Fitted coefficients
are 0 or more: no stage gets faster with more work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls

from experts.expert_stage import RoutedRows
from moe_serve.model.stage.step_inputs import StepInputs, make_step_inputs
from moe_serve.model.step_plan import MicroBatch, SequenceSlice
from moe_serve.pipeline.costs.cost_model import AttentionCost, Experts
from moe_serve.pipeline.costs.step_costs import BatchLoad
from moe_serve.planning.measured_model import LayerKind, MeasuredModel

_LONG_S = 1.0


def usual(times: Sequence[float]) -> float:
    """Returns the lower quartile."""
    return sorted(times)[(len(times) - 1) // 4]


class Stopwatch:
    """Times calls on a device, each for `budget_s` seconds and 3 to 200 times; long ones once."""

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self._device, self._budget_s = device, budget_s

    def seconds(self, call: Callable[[], object]) -> float:
        """Returns the seconds of a call, after one that is not counted."""
        self._time(call)
        times: list[float] = []
        while not times or (len(times) < 3 and sum(times) < _LONG_S) or self._has_time(times):
            times.append(self._time(call))
        return usual(times)

    def _has_time(self, times: Sequence[float]) -> bool:
        return sum(times) < self._budget_s and len(times) < 200

    def _time(self, call: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_ROWS = (1, 4, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class ExpertSample:
    """Seconds of one layer; `num_activated` is the mean over layers."""

    num_rows: int
    num_choices: int
    num_activated: float
    is_natural: bool
    seconds: float


@torch.inference_mode()
def time_experts(
    model: MeasuredModel, rows: Mapping[int, RoutedRows], is_natural: bool, stopwatch: Stopwatch
) -> ExpertSample:
    """Times the expert stage. `rows` is by layer: the layers take turns."""

    def layers() -> None:
        for layer, part in rows.items():
            experts = model.experts.layer(layer)
            experts.total(part.x_TD, part.expert_ids_TK, part.weights_TK)

    ids = [part.expert_ids_TK for part in rows.values()]
    return ExpertSample(
        num_rows=len(ids[0]),
        num_choices=ids[0].numel(),
        num_activated=float(np.mean([len(part.unique()) for part in ids])),
        is_natural=is_natural,
        seconds=stopwatch.seconds(layers) / len(rows),
    )


def first_rows(rows: Mapping[int, RoutedRows], count: int) -> dict[int, RoutedRows]:
    return {
        layer: RoutedRows(r.x_TD[:count], r.expert_ids_TK[:count], r.weights_TK[:count])
        for layer, r in rows.items()
    }


def random_choices(
    rows: Mapping[int, RoutedRows], num_experts: int, seed: int
) -> dict[int, RoutedRows]:
    """Sends the same rows each to k experts drawn uniformly, ascending as a router's are."""
    generator = torch.Generator().manual_seed(seed)
    chosen = {}
    for layer, r in rows.items():
        draws_TE = torch.rand(len(r.x_TD), num_experts, generator=generator)
        ids_TK = draws_TE.topk(r.expert_ids_TK.shape[1], dim=1).indices.sort(dim=1).values
        chosen[layer] = RoutedRows(r.x_TD, ids_TK.to(r.expert_ids_TK.device), r.weights_TK)
    return chosen


def fit_experts(num_experts: int, top_k: int, samples: Sequence[ExpertSample]) -> Experts:
    """Fits the number of equally popular experts that would be activated as often as the measured
    ones."""
    counts = np.array([(s.num_rows, s.num_activated) for s in samples])
    candidates = np.linspace(top_k, num_experts, 512)
    missed = (1 - top_k / candidates[:, None]) ** counts[None, :, 0]
    errors = np.log(candidates[:, None] * (1 - missed) / counts[None, :, 1])
    best = candidates[np.square(errors).sum(axis=1).argmin()]
    return Experts(num_experts=num_experts, top_k=top_k, num_effective=float(best))


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

    def num_pages(self, page_size: int) -> int:
        """Returns the pages of one sequence."""
        return -(-(self.start + self.num_rows) // page_size)


@dataclass(frozen=True, slots=True)
class AttentionSample:
    """Seconds of one layer."""

    load: BatchLoad
    seconds: float


def attention_cases(model: MeasuredModel, is_quick: bool) -> list[Case]:
    """Returns the cases of the grid that fit the model's context and this machine's memory."""
    decode, chunks = (_QUICK_DECODE, _QUICK_CHUNKS) if is_quick else (_DECODE, _CHUNKS)
    cases = [Case(n, 1, min(context, model.max_context) - 1) for n, context in decode]
    cases += [Case(1, n, start) for n, start in chunks if start + n <= model.max_context]
    limit, size = model.cache.num_pages, model.cache.page_size
    return [c for c in dict.fromkeys(cases) if c.num_sequences * c.num_pages(size) <= limit]


@torch.inference_mode()
def time_attention(
    model: MeasuredModel, kind: LayerKind, case: Case, stopwatch: Stopwatch
) -> AttentionSample:
    """Times the layers of a kind in turn: norm, attention, router, shared expert and residual."""
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
    """Gives every sequence pages of its own, as different requests have. Page 0 is the empty
    one."""
    tokens = np.arange(case.num_rows, dtype=np.int64) % model.spec.vocab_size
    num_pages = case.num_pages(model.cache.page_size)
    return tuple(
        SequenceSlice(
            index,
            case.start,
            tokens,
            tuple(range(1 + index * num_pages, 1 + (index + 1) * num_pages)),
            1,
        )
        for index in range(case.num_sequences)
    )


Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fit. `errors`: predicted / measured - 1 of each measurement."""

    coefficients: tuple[float, ...]
    r_squared: float
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        return float(np.median(np.abs(self.errors)))

    @property
    def max_error(self) -> float:
        return float(np.max(np.abs(self.errors)))


def fit(columns: Array, seconds: Array, weights: Array | None = None) -> Fit:
    """Fits `columns` [N, C] times coefficients [C] to `seconds` [N], all greater than 0.

    Minimises relative errors: a step of a millisecond matters as much as one of a second, unless
    `weights` [N] says otherwise.
    """
    assert columns.shape[0] == len(seconds) > 0, f"{columns.shape} for {len(seconds)} measurements"
    roots = np.ones(len(seconds)) if weights is None else np.sqrt(weights)
    weighted = columns / seconds[:, None] * roots[:, None]
    scale = np.linalg.norm(weighted, axis=0)  # columns differ by many orders of magnitude
    scale[scale == 0] = 1.0
    best = nnls(weighted / scale, roots)[0] / scale
    predicted = columns @ best
    spread = float(np.square(seconds - seconds.mean()).sum())
    rest = float(np.square(seconds - predicted).sum())
    return Fit(
        coefficients=tuple(best.tolist()),
        r_squared=1.0 if spread == 0 else 1 - rest / spread,
        errors=tuple((predicted / seconds - 1).tolist()),
    )


def fit_attention(samples: Sequence[AttentionSample]) -> tuple[AttentionCost, Fit]:
    """Tries every place for the knee and returns the fit with the smallest errors."""
    loads, seconds = [s.load for s in samples], np.array([s.seconds for s in samples])
    columns = np.array(
        [(1, x.num_rows, x.num_kv_tokens, x.num_pairs) for x in loads], dtype=np.float64
    )
    best: tuple[float, int, Fit] | None = None
    for knee in _knees(loads):
        beyond = np.maximum(0, columns[:, 2] - knee)
        found = fit(np.column_stack([columns, beyond]), seconds)
        loss = float(np.square(found.errors).sum())
        if best is None or loss < best[0]:
            best = loss, knee, found
    assert best is not None, "there is always a knee to try"
    _, knee, found = best
    alpha_s, row_s, kv_token_s, pair_s, spill_s = found.coefficients
    cost = AttentionCost(
        alpha_s=alpha_s,
        row_s=row_s,
        kv_token_s=kv_token_s,
        pair_s=pair_s,
        spill_s=spill_s,
        spill_tokens=knee,
    )
    return cost, found


def _knees(loads: Sequence[BatchLoad]) -> Iterator[int]:
    """Yields powers of two inside the measured range."""
    most = max(load.num_kv_tokens for load in loads)
    return (1 << bits for bits in range(10, max(11, most.bit_length() - 1)))
