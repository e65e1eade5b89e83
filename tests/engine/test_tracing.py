"""Recording a live engine: the recorded requests, their fields, and the replies to start and
stop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from moe_serve.config.sections import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    TraceConfig,
)
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.routes.route_recorder import RouteRecorder
from moe_serve.engine.routes.route_records import RouteRecord
from moe_serve.engine.tracing import Tracing, trace_header
from moe_serve.errors import ConfigError, InvalidRequestError, TracingError
from routing_predictor.traces.recording import TracedTokens, TraceHeader
from routing_predictor.traces.trace_file import read_traces

CONFIG = EngineConfig(
    model=ModelConfig(num_threads=1),
    cache=CacheConfig(num_pages=12),  # too few for all: some are preempted
    scheduler=SchedulerConfig(max_num_seqs=8, max_batched_tokens=48),
)


@pytest.fixture(scope="module")
def built() -> Iterator[BuiltEngine]:
    made = build_engine(replace(CONFIG, model=replace(CONFIG.model, max_model_len=160)))
    yield made
    made.engine.close()


def tracing(built: BuiltEngine, folder: Path | None, **config: object) -> Tracing:
    of = TraceConfig(directory=None if folder is None else str(folder), **config)  # type: ignore[arg-type]
    return Tracing(of, built.routes, lambda: trace_header(built, CONFIG, "demo"), lambda: 0.0)


def run(built: BuiltEngine, name: str, count: int = 8) -> dict[str, list[int]]:
    """Returns the prompts and answers of some requests, by id."""
    whole = {}
    for index in range(count):
        prompt = tuple(range(1 + index, 20 + 4 * index))
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        request = GenerationRequest(
            request_id=f"{name}{index}", prompt_token_ids=prompt, params=params
        )
        built.engine.add(request)
        whole[request.request_id] = list(prompt)
    while built.engine.has_work:
        for delta in built.engine.step():
            whole[delta.request_id] += delta.token_ids
    return whole


def test_a_recording_holds_every_token_once(built: BuiltEngine, tmp_path: Path) -> None:
    before = built.engine.stats().counts.num_preemptions
    plain = run(built, "plain")
    traced = tracing(built, tmp_path, sample_rate=1.0, tokens=True, weights=True)
    started = traced.start()
    assert started.is_recording and started.folder == str(tmp_path / "19700101-000000")
    whole = run(built, "a")
    stopped = traced.stop()
    assert list(whole.values()) == list(plain.values()), "recording changes no token"
    assert built.engine.stats().counts.num_preemptions > before, "some requests are told of twice"
    trace = read_traces([tmp_path / "19700101-000000"])
    assert stopped.recording.num_tokens == trace.num_tokens and not stopped.is_recording
    assert trace.model == "demo" and len(trace.model_identity) == 64
    assert trace.token_N is not None and trace.weights_NLK is not None
    for number, request_id in enumerate(trace.request_ids):
        mine = trace.select(trace.request_N == number)
        first = int(mine.position_N[0])  # what the prefix cache had is not computed
        assert first % 16 == 0
        assert mine.position_N.tolist() == list(range(first, len(whole[request_id]) - 1))
        assert mine.token_N is not None
        assert mine.token_N.tolist() == whole[request_id][first:-1]
    np.testing.assert_allclose(trace.weights_NLK.astype(np.float32).sum(2), 1.0, atol=2e-3)


def test_a_share_of_the_requests_without_tokens(built: BuiltEngine, tmp_path: Path) -> None:
    traced = tracing(built, tmp_path)
    traced.start(sample_rate=0.5)
    run(built, "some", 16)
    status = traced.stop()
    assert status.sample_rate == 0.5 and not status.has_tokens and not status.has_weights
    trace = read_traces([tmp_path / "19700101-000000"])
    assert 2 <= len(trace.request_ids) <= 14
    assert trace.token_N is None and trace.weights_NLK is None
    assert (np.bincount(trace.request_N) > 20).all(), "those that are recorded are so wholly"


def test_start_and_stop_answer_what_is_wrong(built: BuiltEngine, tmp_path: Path) -> None:
    with pytest.raises(TracingError, match=r"trace\.directory is not configured"):
        tracing(built, None).start()
    (tmp_path / "file").write_text("")
    with pytest.raises(TracingError, match="Nothing is recorded: .* cannot be made"):
        tracing(built, tmp_path / "file").start()
    traced = tracing(built, tmp_path)
    with pytest.raises(TracingError, match="No recording is running"):
        traced.stop()
    traced.start()
    with pytest.raises(TracingError, match="is already running, in .*19700101-000000"):
        traced.start()
    traced.close()
    traced.close()
    assert traced.start().folder == str(tmp_path / "19700101-000000-2")
    traced.close()


def test_a_start_that_is_refused_changes_nothing(built: BuiltEngine, tmp_path: Path) -> None:
    def placement_is_gone() -> TraceHeader:
        raise ConfigError("p.json cannot be read: No such file or directory.")

    before = tracing(built, tmp_path).status()
    traced = tracing(built, tmp_path)
    with pytest.raises(InvalidRequestError, match=r"sample_rate must be in \[0.0001, 1\], got 2"):
        traced.start(sample_rate=2.0, has_weights=True)
    assert traced.status() == before
    config = TraceConfig(directory=str(tmp_path))
    broken = Tracing(config, built.routes, placement_is_gone, lambda: 0.0)
    with pytest.raises(InvalidRequestError, match=r"^Nothing is recorded: p.json cannot .*ory\.$"):
        broken.start(sample_rate=0.5, has_weights=True)
    assert broken.status() == before and not list(tmp_path.iterdir())


def test_the_cap_is_of_all_recordings(built: BuiltEngine, tmp_path: Path) -> None:
    """The oldest files are removed first, and only files that a recording wrote."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "part-000000.safetensors").write_bytes(b"x" * 100_000)
    for name in ("x", "y"):
        traced = tracing(built, tmp_path, sample_rate=1.0, weights=True, max_bytes=64 * 1024)
        folder = traced.start().folder
        run(built, name, 10)
        stats = traced.stop().recording
        assert folder is not None and stats.num_parts == len(list(Path(folder).iterdir()))
        parts = list(tmp_path.glob("1970*/part-*"))
        size = sum(part.stat().st_size for part in parts)
        assert 32 * 1024 < size <= 64 * 1024, "of all recordings"
    assert stats.num_dropped_parts == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [Path(folder).name, "notes"]


def test_totals_go_on_over_recordings(built: BuiltEngine, tmp_path: Path) -> None:
    traced = tracing(built, tmp_path, sample_rate=1.0)
    counts = []
    for name in ("x", "y"):
        traced.start()
        run(built, name, 2)
        counts.append(traced.stop().recording.num_tokens)
    assert traced.status().total.num_tokens == sum(counts)
    assert traced.status().recording.num_tokens == counts[1]


def test_nothing_is_taken_after_the_end() -> None:
    taken: list[TracedTokens] = []

    class Sink:
        def add(self, tokens: Sequence[TracedTokens]) -> None:
            taken.extend(tokens)

    recorder = RouteRecorder(Sink(), 1.0, has_weights=False)
    record = RouteRecord(
        request_id="r",
        sequence_id=0,
        start=0,
        num_prompt_tokens=1,
        token_ids_N=np.zeros(2, np.int32),
        expert_ids_NLK=np.zeros((2, 1, 1), np.uint8),
    )
    recorder.take([record])
    recorder.take([record, msgspec.structs.replace(record, start=1)])
    assert [(t.start, len(t.token_ids_N)) for t in taken] == [(0, 2), (2, 1)]
    recorder.end()
    recorder.take([msgspec.structs.replace(record, start=3)])
    assert len(taken) == 2
