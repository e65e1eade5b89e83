"""Compares prompts that pass groups of layers with prompts in chunks: expert reads and seconds.

    python benchmarks/run.py layered_prefill moe_serve/demo_model build/random-128x8

One engine reads a prompt while B requests decode. `scheduler.layered_prefill` takes turns: off, on,
auto, at the same step budget. Reads are counted exactly, as the different experts of each product
in the steps from the prompt's arrival to its first token. Seconds are those of the process on its
one thread, so that a busy machine does not count; ratios are medians of the ratios of neighbouring
runs. Tokens are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from harness.environment import write_report
from moe_serve.config.sections import (
    CacheConfig,
    EngineConfig,
    LayeredPrefillName,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.engine.engine import Engine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.engine.routes.route_records import RouteRecord
from moe_serve.engine.schedule.layered_prefill import LayeredPrefill
from moe_serve.model.step_plan import SequenceSlice
from moe_serve.pipeline.route_tap import RouteTap

MODES: tuple[LayeredPrefillName, ...] = ("off", "on", "auto")
_CONTEXT = 32  # prompt tokens of a request that decodes
_WARM = 2  # decode steps before the prompt comes
_LONG = "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A prompt from its arrival to its first token: seconds of its steps, all tokens, and expert
    reads if they were counted."""

    steps_s: tuple[float, ...]
    tokens: tuple[tuple[str, tuple[int, ...]], ...]
    num_reads: int

    @property
    def seconds(self) -> float:
        return sum(self.steps_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one model, prompt length and number of decoding requests, by mode.

    `reads` are per prompt token. `ttft_ratio`: median over rounds of a mode's seconds over those of
    `off`, with the least and the most. `least_ratio`: of the least seconds of all rounds, which a
    busy machine disturbs least. `p99_ratio`: of all steps that read the prompt.
    """

    model: str
    num_decoding: int
    prompt: int
    chunk: int
    reads: dict[str, float]
    num_steps: dict[str, int]
    ttft_ms: dict[str, float]
    p99_ms: dict[str, float]
    ttft_ratio: dict[str, tuple[float, float, float]]
    least_ratio: dict[str, float]

    @property
    def saved_reads(self) -> float:
        return 1 - self.reads["on"] / self.reads["off"]

    def p99_ratio(self, mode: str) -> float:
        return self.p99_ms[mode] / self.p99_ms["off"]

    def __str__(self) -> str:
        reads = " ".join(f"{self.reads[mode]:6.2f}" for mode in MODES)
        steps = "/".join(str(self.num_steps[mode]) for mode in MODES)
        times = " ".join(f"{self.ttft_ms[mode]:7.1f}" for mode in MODES)
        ratios = "  ".join(
            "{:.2f} [{:.2f}, {:.2f}]".format(*self.ttft_ratio[mode]) for mode in MODES[1:]
        )
        least = " ".join(f"{self.least_ratio[mode]:.2f}" for mode in MODES[1:])
        tails = " ".join(f"{self.p99_ratio(mode):.2f}" for mode in MODES[1:])
        return (
            f"{self.model:>14} {self.num_decoding:3} {self.prompt:5}  {reads} "
            f"{100 * self.saved_reads:4.0f}%  {steps:>9}  {times}  {ratios}  {least}  {tails}"
        )


_HEAD = (
    "         model   B     P   reads per token off, on, auto  saved  steps      "
    "TTFT ms off, on, auto     on/off [least, most]  auto/off  of least seconds  P99 step"
)


class EveryRoute:
    """A route listener that makes the pipeline keep all choices."""

    has_weights = False

    def wants(self, step: int, sequences: dict[int, EngineSequence]) -> list[int]:
        return list(sequences)

    def take(self, records: list[RouteRecord]) -> None:
        """Does nothing."""


class ReadCounter:
    """Counts the different experts of each product."""

    def __init__(self) -> None:
        self.num_reads = 0

    @contextmanager
    def counting(self, built: BuiltEngine) -> Iterator[None]:
        """Counts while the block runs."""
        take, listener = RouteTap.take, EveryRoute()

        def counted(
            tap: RouteTap,
            micro_batch: int,
            ids_TK: Tensor,
            weights_TK: Tensor,
            pieces: Sequence[SequenceSlice] | None = None,
        ) -> None:
            found: NDArray[np.int64] = np.unique(ids_TK.numpy())
            self.num_reads += len(found)
            take(tap, micro_batch, ids_TK, weights_TK, pieces)

        self.num_reads = 0
        built.routes.add(listener)  # type: ignore[arg-type]
        RouteTap.take = counted  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            RouteTap.take = take  # type: ignore[method-assign]
            built.routes.remove(listener)  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    rows: list[Row] = []
    print(_HEAD)
    for folder in options.models:
        for num_decoding in options.decoding:
            runs = Runs(folder, num_decoding, options)
            for prompt in options.prompts:
                rows.append(runs.row(prompt, options.rounds))
                print(rows[-1], flush=True)
    write_report(options.json, {"rows": [asdict(row) for row in rows]})
    return 0


class Runs:
    """One engine, and the objects that make it read prompts in each mode."""

    def __init__(self, folder: str, num_decoding: int, options: argparse.Namespace) -> None:
        self._name, self._num_decoding = Path(folder).name, num_decoding
        self._chunk, most = options.chunk, max(options.prompts)
        pages = -(-(most + 64) // 16) + (num_decoding + 1) * 64
        config = EngineConfig(
            speculation=SpeculationConfig(method="off"),
            model=ModelConfig(path=folder, num_threads=1),
            cache=CacheConfig(num_pages=max(pages, 300), prefix_cache=False),
            scheduler=SchedulerConfig(
                max_num_seqs=num_decoding + 1, max_batched_tokens=options.chunk + num_decoding
            ),
        )
        self._built = build_engine(config)
        assert isinstance(self._built.engine, Engine), "one process"
        self._engine: Engine = self._built.engine
        report = self._built.layout
        self._layered = {
            mode: LayeredPrefill.of(_with(config, mode), self._built.spec, "cpu", report.dtype)
            for mode in MODES
        }
        self._vocab_size = self._built.spec.vocab_size

    def row(self, prompt: int, rounds: int) -> Row:
        """Measures prompts of one length in `rounds` rounds, after one that counts reads."""
        counter, counted = ReadCounter(), dict[str, Reading]()
        for mode in MODES:
            counted[mode] = self._read(mode, prompt, 0, counter)
        found: dict[str, list[Reading]] = {mode: [] for mode in MODES}
        for number in range(rounds):
            order = MODES[number % 3 :] + MODES[: number % 3]
            for mode in order:
                found[mode].append(self._read(mode, prompt, number, None))
        for mode in MODES[1:]:
            same = [r.tokens == o.tokens for r, o in zip(found[mode], found["off"], strict=True)]
            assert all(same), f"{mode} has changed a token"
        return self._summary(prompt, counted, found)

    def _summary(
        self, prompt: int, counted: dict[str, Reading], found: dict[str, list[Reading]]
    ) -> Row:
        def by_mode(figure: Callable[[str], float]) -> dict[str, float]:
            return {mode: figure(mode) for mode in MODES}

        ratios = {
            mode: [r.seconds / o.seconds for r, o in zip(found[mode], found["off"], strict=True)]
            for mode in MODES
        }
        return Row(
            model=self._name,
            num_decoding=self._num_decoding,
            prompt=prompt,
            chunk=self._chunk,
            reads=by_mode(lambda mode: counted[mode].num_reads / prompt),
            num_steps={mode: len(counted[mode].steps_s) for mode in MODES},
            ttft_ms=by_mode(lambda m: 1e3 * statistics.median(r.seconds for r in found[m])),
            p99_ms=by_mode(
                lambda m: 1e3 * float(np.percentile([s for r in found[m] for s in r.steps_s], 99))
            ),
            ttft_ratio={
                mode: (statistics.median(each), min(each), max(each))
                for mode, each in ratios.items()
            },
            least_ratio=by_mode(
                lambda m: min(r.seconds for r in found[m]) / min(r.seconds for r in found["off"])
            ),
        )

    def _read(
        self, mode: LayeredPrefillName, prompt: int, seed: int, counter: ReadCounter | None
    ) -> Reading:
        """Lets requests decode, add the prompt, and step until its first token."""
        engine, rng = self._engine, np.random.default_rng(seed)
        scheduler = engine._scheduler
        scheduler.layered = scheduler.starter._layered = self._layered[mode]
        for index in range(self._num_decoding):
            engine.add(self._request(f"r{index}", rng, _CONTEXT, 10_000))
        tokens: dict[str, list[int]] = {}
        while engine.num_waiting or any(s.num_output_tokens < _WARM for s in _running(engine)):
            _step(engine, tokens)
        engine.add(self._request(_LONG, rng, prompt, 1))
        if counter is None:
            steps_s = _until_first_token(engine, tokens)
        else:
            with counter.counting(self._built):
                steps_s = _until_first_token(engine, tokens)
        for index in range(self._num_decoding):
            engine.abort(f"r{index}")
        while engine.has_work:
            engine.step()
        return Reading(
            steps_s=steps_s,
            tokens=tuple((name, tuple(each[:_WARM])) for name, each in sorted(tokens.items())),
            num_reads=0 if counter is None else counter.num_reads,
        )

    def _request(
        self, name: str, rng: np.random.Generator, length: int, most: int
    ) -> GenerationRequest:
        ids = rng.integers(5, self._vocab_size, length).tolist()
        params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        return GenerationRequest(request_id=name, prompt_token_ids=tuple(ids), params=params)


def _with(config: EngineConfig, mode: LayeredPrefillName) -> EngineConfig:
    return EngineConfig(
        speculation=SpeculationConfig(method="off"),
        model=config.model,
        cache=config.cache,
        scheduler=SchedulerConfig(layered_prefill=mode),
    )


def _running(engine: Engine) -> list[EngineSequence]:
    return list(engine._scheduler.running)


def _until_first_token(engine: Engine, tokens: dict[str, list[int]]) -> tuple[float, ...]:
    steps_s = []
    while _LONG not in tokens:
        clock = time.process_time()
        _step(engine, tokens)
        steps_s.append(time.process_time() - clock)
    return tuple(steps_s)


def _step(engine: Engine, tokens: dict[str, list[int]]) -> None:
    for delta in engine.step():
        assert delta.error is None, f"{delta.request_id}: {delta.error}"
        tokens.setdefault(delta.request_id, []).extend(delta.token_ids)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="checkpoint folders")
    parser.add_argument("--decoding", type=int, nargs="+", default=[0, 4, 8, 16, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[256, 1024, 1900])
    parser.add_argument("--chunk", type=int, default=128, help="prompt tokens of a step")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    return parser
