"""Measures what HTTP adds to an engine: a server and an engine alone serve the same requests.

Both take turns, so that a machine that becomes slower makes both slower. The server is a process
like any other `moe-serve serve`, and the client is that of `moe-serve bench`.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil

from moe_serve.bench.bench_run import ServerProbe
from moe_serve.bench.client.connection import Target
from moe_serve.bench.client.endpoint import Endpoint
from moe_serve.bench.client.load_client import LoadClient
from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.workload.prompt_maker import PromptMaker, Ready, Slot
from moe_serve.child_python import module_command
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.errors import BenchServerError
from moe_serve.pipeline.costs.cost_model import Line
from moe_serve.planning.calibration import CalibrationRequest
from moe_serve.planning.calibration_file import Calibration, FitReport, HttpCosts
from moe_serve.planning.measure import fit
from moe_serve.planning.measured_model import MeasuredModel, load_measured_model
from moe_serve.planning.natural_steps import measured_engine
from moe_serve.planning.whole_steps import one_call_pipeline

_STREAMS = (1, 4, 16, 32)  # at once
_SHORT, _LONGEST, _OUTPUT = 16, 512, 32  # tokens
_INTRUDED = 4  # streams beside which requests begin
_EVERY = 3  # steps between two such requests, without HTTP
_TURNS, _QUICK_TURNS, _LEAST_TURNS = 8, 2, 2
_BUDGET_S = 30.0
_TIMEOUT_S, _STOP_S = 600.0, 60.0
HTTP_STEPS = "steps over HTTP"  # the name of the fit


@dataclass(slots=True)
class _Samples:
    """Seconds over HTTP and without, one of each for a turn."""

    steps: dict[int, list[tuple[float, float]]] = field(default_factory=dict)  # by streams
    firsts: dict[int, list[tuple[float, float]]] = field(default_factory=dict)  # by prompt tokens
    begins: list[tuple[float, float]] = field(default_factory=list)  # that a request takes of steps
    chunks: list[float] = field(default_factory=list)  # between two chunks of a step


def can_measure_http(calibration: Calibration) -> bool:
    """Returns True if HTTP is measured unless the user says otherwise: on a CPU whose free memory
    holds the two copies of the model twice. A GPU holds the model already."""
    num_bytes = calibration.model.attention_bytes + calibration.model.expert_bytes
    free = psutil.virtual_memory().available
    return calibration.machine.device == "cpu" and free >= 4 * num_bytes


def with_http(calibration: Calibration, request: CalibrationRequest) -> Calibration:
    """Measures HTTP and adds it to a calibration of the same model. Raises BenchServerError if no
    server starts."""
    began = time.monotonic()
    model = load_measured_model(request.folder, request.device, request.num_threads)
    costs, report = measure_http(model, _QUICK_TURNS if request.is_quick else _TURNS)
    return replace(
        calibration,
        http=costs,
        fits=(*calibration.fits, report),
        seconds=calibration.seconds + time.monotonic() - began,
    )


def measure_http(model: MeasuredModel, most_turns: int = _TURNS) -> tuple[HttpCosts, FitReport]:
    """Starts a server of a model, and compares it with an engine in this process."""
    with started_server(model.folder, model.device.type, model.num_threads) as url:
        samples = asyncio.run(_measure(url, model, most_turns))
    return _fitted(samples)


@contextmanager
def started_server(
    folder: Path, device: str, num_threads: int, options: Sequence[str] = ()
) -> Iterator[str]:
    """Starts a server without drafts on a free port, and stops it -> its URL. Raises
    BenchServerError if it ends before it is ready."""
    flags = ["--port", "0", "--device", device, "--num-threads", str(num_threads)]
    flags += ["--speculative-config", '{"method": "off"}', *options]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            module_command("moe_serve", "serve", str(folder), *flags),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert server.stdout is not None, "its output is a pipe"
        try:
            for line in server.stdout:
                if found := re.search(r"ready at (http://\S+)", line):
                    yield found[1]
                    break
            else:
                log.seek(0)
                raise BenchServerError(f"the server did not start: {log.read().strip()[-500:]}")
        finally:
            server.terminate()
            try:
                server.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            server.stdout.close()


async def _measure(url: str, model: MeasuredModel, most_turns: int) -> _Samples:
    target, samples = Target.of(url), _Samples()
    async with ServerProbe(target, None, _TIMEOUT_S) as probe:
        endpoint = Endpoint(name="completions", model=await probe.model())
    client = LoadClient(
        target,
        path=endpoint.path,
        api_key=None,
        is_stream=True,
        timeout_s=_TIMEOUT_S,
        now=time.perf_counter,
    )
    until = time.monotonic() + _BUDGET_S
    try:
        await _Turn(-1, client, endpoint, model).run(_Samples())  # to warm up
        for number in range(most_turns):
            if number >= _LEAST_TURNS and time.monotonic() > until:
                break
            await _Turn(number, client, endpoint, model).run(samples)
    finally:
        client.close()
    return samples


class _Turn:
    """One turn of all measurements, with prompts of its own."""

    def __init__(
        self, number: int, client: LoadClient, endpoint: Endpoint, model: MeasuredModel
    ) -> None:
        self._client, self._endpoint, self._model = client, endpoint, model
        self._maker = PromptMaker(kind="tokens", seed=number + 1, vocab_size=model.spec.vocab_size)
        self._num_made = 0

    async def run(self, samples: _Samples) -> None:
        for count in _STREAMS:
            records = await self._streams(count)
            alone, _ = self._alone(count, 0)
            samples.steps.setdefault(count, []).append((_step_seconds(records), alone))
            if (gap_s := chunk_seconds(records)) is not None:
                samples.chunks.append(gap_s)
        longest = min(_LONGEST, self._model.max_context // 4)
        for num_prompt in (_SHORT, longest):
            record = await self._ask(num_prompt, 1)
            assert record.first_s is not None, "it has a token"
            pair = record.first_s - record.started_s, self._first_alone(num_prompt)
            samples.firsts.setdefault(num_prompt, []).append(pair)
        samples.begins.append((await self._begin(), self._begin_alone()))

    async def _streams(self, count: int) -> list[RequestRecord]:
        return await asyncio.gather(*(self._ask(_SHORT, _OUTPUT) for _ in range(count)))

    async def _begin(self) -> float:
        """Returns how much longer streams take for each request that begins beside them."""
        usual_s = _step_seconds(await self._streams(_INTRUDED))
        streams = [asyncio.ensure_future(self._ask(_SHORT, _OUTPUT)) for _ in range(_INTRUDED)]
        num_begun = 0
        while not all(stream.done() for stream in streams):
            await self._ask(_SHORT, 1)
            num_begun += 1
        longer_s = _step_seconds([stream.result() for stream in streams])
        return (longer_s - usual_s) * (_OUTPUT - 1) / num_begun

    def _begin_alone(self) -> float:
        usual_s, _ = self._alone(_INTRUDED, 0)
        longer_s, num_begun = self._alone(_INTRUDED, _EVERY)
        return (longer_s - usual_s) * (_OUTPUT - 1) / num_begun

    async def _ask(self, num_prompt: int, num_output: int) -> RequestRecord:
        body = self._endpoint.body(self._prompt(num_prompt), num_output)
        ready = Ready(index=self._num_made, at_s=0.0, output_tokens=num_output, body=body)
        record = await self._client.send(ready)
        if not record.is_ok:
            raise BenchServerError(f"a request failed: {record.error}: {record.detail}")
        return record

    def _prompt(self, num_prompt: int) -> list[int]:
        self._num_made += 1
        slot = Slot(index=self._num_made, at_s=0.0, prompt_tokens=num_prompt, output_tokens=_OUTPUT)
        ids = self._maker.prompt(slot)
        return [each for each in ids if isinstance(each, int)]

    def _engine(self) -> Engine:
        sampler = Sampler(frozenset(self._model.spec.eos_token_ids))
        executor = LocalExecutor(one_call_pipeline(self._model), sampler)
        return measured_engine(executor, self._model, SchedulerConfig())

    def _add(self, engine: Engine, num_prompt: int, num_output: int) -> None:
        prompt = tuple(self._prompt(num_prompt))
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        engine.add(
            GenerationRequest(
                request_id=str(self._num_made), prompt_token_ids=prompt, params=params
            )
        )

    def _alone(self, count: int, every: int) -> tuple[float, int]:
        """Returns the mean seconds of an engine's steps with so many streams, and the number of
        requests that began beside them, one in every `every` steps (0: none)."""
        engine, num_begun = self._engine(), 0
        for _ in range(count):
            self._add(engine, _SHORT, _OUTPUT)
        engine.step()
        began = time.perf_counter()
        for step in range(_OUTPUT - 1):
            if every and step % every == 0:
                self._add(engine, _SHORT, 1)
                num_begun += 1
            engine.step()
        return (time.perf_counter() - began) / (_OUTPUT - 1), num_begun

    def _first_alone(self, num_prompt: int) -> float:
        engine = self._engine()
        began = time.perf_counter()
        self._add(engine, num_prompt, 1)
        while engine.has_work:
            engine.step()
        return time.perf_counter() - began


def _step_seconds(records: Sequence[RequestRecord]) -> float:
    """Returns the usual seconds of a step with all streams: those that began in the first step had
    one more, in which the others were read."""
    return statistics.median(record.tpot_s or 0.0 for record in records)


def chunk_seconds(records: Sequence[RequestRecord]) -> float | None:
    """Returns the seconds between two chunks of the same step, from the largest group of streams
    that began in one step; None if none has two streams."""
    step_s = _step_seconds(records)
    whole = [r for r in records if r.num_events == r.wanted_tokens and r.first_s is not None]
    whole.sort(key=lambda r: r.first_s or 0.0)
    groups: list[list[RequestRecord]] = []
    for record in whole:
        before = groups[-1][-1].first_s if groups else None
        if before is None or (record.first_s or 0.0) - before > step_s / 2:
            groups.append([])
        groups[-1].append(record)
    largest = max(groups, key=len, default=[])
    if len(largest) < 2:
        return None
    times = np.array([np.cumsum([r.first_s or 0.0, *r.gaps_s]) for r in largest])
    places = np.median(times - times.min(axis=0), axis=1)
    return float(places.max() - places.min()) / (len(largest) - 1)


def _fitted(samples: _Samples) -> tuple[HttpCosts, FitReport]:
    counts = np.array(sorted(samples.steps), dtype=np.float64)
    pairs = [np.median(samples.steps[int(count)], axis=0) for count in counts]
    http, alone = (np.array([pair[i] for pair in pairs]) for i in (0, 1))
    # Losses may be as small as their scatter, so they count relative to the whole steps.
    lost = np.maximum(http - alone, 1e-9)
    found = fit(np.column_stack([np.ones_like(counts), counts]), lost, np.square(lost / http))
    step = Line(*found.coefficients)
    predicted = alone + step.alpha_s + step.beta_s * counts
    spread, rest = np.square(http - http.mean()).sum(), np.square(http - predicted).sum()
    errors = np.abs(predicted / http - 1)
    begun, begun_alone = np.median(samples.begins, axis=0)
    costs = HttpCosts(
        request=_request_line(samples, step),
        begin_s=max(0.0, float(begun - begun_alone)),
        chunk_s=statistics.median(samples.chunks) if samples.chunks else 0.0,
        step=step,
    )
    return costs, FitReport(
        name=HTTP_STEPS,
        num_samples=len(counts),
        r_squared=1 - float(rest / spread) if spread else 1.0,
        median_error=float(np.median(errors)),
        max_error=float(errors.max()),
    )


def _request_line(samples: _Samples, step: Line) -> Line:
    """Returns the delay of a first token by its prompt's tokens, without what its step loses."""
    (short, short_s), (long, long_s) = (
        (num, max(0.0, float(np.median([a - b for a, b in pairs])) - step.seconds(1)))
        for num, pairs in sorted(samples.firsts.items())
    )
    beta_s = max(0.0, (long_s - short_s) / (long - short))
    return Line(max(0.0, short_s - beta_s * short), beta_s)
