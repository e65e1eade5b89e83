"""Runs every implementation on every piece of work."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kernel_bench import decode_work, expert_work
from kernel_bench.clock import Clock, DeviceLimits, bound
from kernel_bench.decode_work import SDPA, make_scene, own_decode, sdpa_decode
from kernel_bench.expert_contestants import REFERENCE, ExpertContestant, Layer, contestants
from kernel_bench.expert_work import LayerRows, LayerWeights, make_rows, make_weights
from kernel_bench.measurement import Measurement, WorkResult, last_line, relative_error
from kernel_bench.shapes import DecodeShape
from moe_kernels.gpu.expert_layers import ExpertLayerSizes
from moe_kernels.kernel_choice import choose_kernels

Say = Callable[[str], None]


def run_layer(
    shape: ExpertLayerSizes,
    all_tokens: Sequence[int],
    dtype: torch.dtype,
    clock: Clock,
    limits: DeviceLimits,
    say: Say,
) -> Iterator[WorkResult]:
    """Returns one result per number of tokens; an implementation is created once for all of
    them.
    """
    weights = make_weights(shape, dtype, clock.device)
    found = contestants(clock.device, dtype)
    if clock.device.type == "cuda":
        found += importlib.import_module("kernel_bench.low_bits").low_bit_contestants(clock.device)
    layers = {contestant.name: _make(contestant, weights) for contestant in found}
    for num_tokens in all_tokens:
        say(f"{shape.name}, {num_tokens} tokens")
        rows = make_rows(shape, num_tokens, dtype, clock.device)
        reference = _result(layers[REFERENCE], rows)
        yield WorkResult(
            work="experts",
            shape=shape.name,
            num_tokens=num_tokens,
            bound=bound(
                limits,
                expert_work.least_bytes(shape, rows, dtype.itemsize),
                expert_work.operations(shape, rows),
            ),
            measurements=tuple(
                _measure_layer(contestant, layers[contestant.name], rows, reference, clock)
                for contestant in found
            ),
        )


def _make(contestant: ExpertContestant, weights: LayerWeights) -> Layer | str:
    """Makes the layer, or returns the reason why it cannot be made."""
    try:
        return contestant.make(weights)
    except Exception as error:  # a peer may fail in any way; the others continue
        return last_line(error)


def _result(layer: Layer | str, rows: LayerRows) -> Tensor:
    assert not isinstance(layer, str), f"the reference could not be made: {layer}"
    return layer(rows)


def _measure_layer(
    contestant: ExpertContestant,
    layer: Layer | str,
    rows: LayerRows,
    reference: Tensor,
    clock: Clock,
) -> Measurement:
    if isinstance(layer, str):
        return Measurement(contestant=contestant.name, failure=layer)
    return _measure(
        contestant.name,
        lambda: layer(rows),
        reference if contestant.is_exact else None,
        clock,
        contestant.is_capturable,
    )


def _measure(
    name: str,
    work: Callable[[], Tensor],
    reference: Tensor | None,
    clock: Clock,
    is_capturable: bool,
) -> Measurement:
    try:
        error = None if reference is None else relative_error(work(), reference)
        timing = clock.measure(work, is_capturable)
    except Exception as failure:  # as above; on a GPU mostly out of memory
        return Measurement(contestant=name, failure=last_line(failure))
    return Measurement(contestant=name, timing=timing, error=error)


def run_decode(
    shape: DecodeShape, dtype: torch.dtype, clock: Clock, limits: DeviceLimits, say: Say
) -> WorkResult:
    say(shape.name)
    scene = make_scene(shape, dtype, clock.device)
    kernels = choose_kernels(clock.device, dtype)
    own = own_decode(shape, scene, kernels)
    return WorkResult(
        work="attention",
        shape=shape.name,
        num_tokens=shape.num_sequences,
        bound=bound(limits, decode_work.least_bytes(shape, dtype), decode_work.operations(shape)),
        measurements=(
            _measure("moe-serve", own, None, clock, True),
            _measure(SDPA, sdpa_decode(shape, scene), None, clock, True),
        ),
    )
