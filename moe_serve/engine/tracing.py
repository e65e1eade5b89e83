"""Starts, stops and reports recordings of a running server's routing. Safe from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from moe_serve.cache.page_key import model_identity
from moe_serve.config.sections import EngineConfig, TraceConfig
from moe_serve.engine.build import BuiltEngine
from moe_serve.engine.routes.placement_version import placement_version
from moe_serve.engine.routes.route_recorder import RouteRecorder
from moe_serve.engine.routes.route_records import RouteListeners
from moe_serve.errors import CheckpointError, ConfigError, InvalidRequestError, TracingError
from routing_predictor.traces.recording import (
    RecordingStats,
    RecordingWriter,
    TraceHeader,
    earlier_parts,
)
from routing_predictor.traces.routing_error import TraceError

MIN_RATE = 0.0001


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingStatus:
    """The running or last recording, and the totals of all recordings since the server started."""

    is_recording: bool
    folder: str | None  # None: no recording yet
    sample_rate: float
    has_weights: bool
    has_tokens: bool
    recording: RecordingStats
    total: RecordingStats


@dataclass(frozen=True, slots=True)
class _Running:
    """A running recording: its writer and the listener that fills it."""

    writer: RecordingWriter
    recorder: RouteRecorder


class Tracing:
    """Manages recordings, at most one at a time."""

    def __init__(
        self,
        config: TraceConfig,
        routes: RouteListeners,
        read_header: Callable[[], TraceHeader],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._routes, self._read_header = config, routes, read_header
        self._clock = clock
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._folder: Path | None = None
        self._rate, self._has_weights = config.sample_rate, config.weights
        self._last, self._past = RecordingStats(), RecordingStats()  # last, and all earlier ones

    def start(
        self, sample_rate: float | None = None, has_weights: bool | None = None
    ) -> TracingStatus:
        """Begins a recording in a new folder.

        Raises TracingError if it cannot start now, and InvalidRequestError if it can never start
        with these values; the status is then unchanged.
        """
        config = self._config
        rate = config.sample_rate if sample_rate is None else sample_rate
        has_weights = config.weights if has_weights is None else has_weights
        if not MIN_RATE <= rate <= 1.0:
            raise InvalidRequestError(
                f"sample_rate must be in [{MIN_RATE:g}, 1], got {rate:g}.", param="sample_rate"
            )
        with self._lock:
            if config.directory is None:
                raise TracingError("Nothing can be recorded: trace.directory is not configured.")
            if self._running is not None:
                raise TracingError(
                    f"A recording is already running, in {self._folder}: stop it first."
                )
            writer = self._open(Path(config.directory).expanduser(), self._header(has_weights))
            recorder = RouteRecorder(writer, rate, has_weights=has_weights)
            self._rate, self._has_weights = rate, has_weights
            self._past, self._last = _sum(self._past, self._last), RecordingStats()
            self._running, self._folder = _Running(writer, recorder), writer.folder
            self._routes.add(recorder)
        return self.status()

    def stop(self) -> TracingStatus:
        """Ends the recording and writes its remaining tokens. Raises TracingError if none is
        running."""
        with self._lock:
            if self._running is None:
                raise TracingError("No recording is running.")
            self._end(self._running)
        return self.status()

    def status(self) -> TracingStatus:
        running = self._running
        recording = self._last if running is None else running.writer.stats()
        return TracingStatus(
            is_recording=running is not None,
            folder=None if self._folder is None else str(self._folder),
            sample_rate=self._rate,
            has_weights=self._has_weights,
            has_tokens=self._config.tokens,
            recording=recording,
            total=_sum(self._past, recording),
        )

    def close(self) -> None:
        """Ends a running recording and writes its remaining tokens, as the server ends."""
        with self._lock:
            if self._running is not None:
                self._end(self._running)

    def _end(self, running: _Running) -> None:
        self._routes.remove(running.recorder)
        running.recorder.end()
        self._last, self._running = running.writer.close(), None

    def _header(self, has_weights: bool) -> TraceHeader:
        """Reads the header. The configured files may have changed since the server started."""
        try:
            header = self._read_header()
        except (ConfigError, CheckpointError, OSError) as error:
            why = str(error).rstrip(".")
            raise InvalidRequestError(f"Nothing is recorded: {why}.", param=None) from None
        return replace(header, has_weights=has_weights, has_tokens=self._config.tokens)

    def _open(self, directory: Path, header: TraceHeader) -> RecordingWriter:
        """Creates a folder named after the time in seconds, with a number if it exists already."""
        name = time.strftime("%Y%m%d-%H%M%S", time.gmtime(self._clock()))
        folder, number = directory / name, 1
        while folder.exists():
            number += 1
            folder = directory / f"{name}-{number}"
        try:
            return RecordingWriter(
                folder,
                header,
                part_bytes=min(self._config.part_bytes, self._config.max_bytes),
                max_bytes=self._config.max_bytes,
                earlier=earlier_parts(directory),
            )
        except TraceError as error:
            raise TracingError(f"Nothing is recorded: {error}.") from None


def make_tracing(
    built: BuiltEngine, engine: EngineConfig, config: TraceConfig, name: str
) -> Tracing:
    """Builds the recording control of a server whose model is called `name`."""
    return Tracing(config, built.routes, lambda: trace_header(built, engine, name))


def trace_header(built: BuiltEngine, config: EngineConfig, name: str) -> TraceHeader:
    """Returns the header of this engine's traces. Reads samples of the model's weights."""
    spec = built.spec
    return TraceHeader(
        num_experts=spec.router.num_experts,
        layers=tuple(i for i, layer in enumerate(spec.layers) if layer.is_sparse),
        model=name,
        model_identity=model_identity(built.layout.folder).hex(),
        placement_version=placement_version(config.cluster),
    )


def _sum(one: RecordingStats, other: RecordingStats) -> RecordingStats:
    return RecordingStats(
        one.num_tokens + other.num_tokens,
        one.num_written_bytes + other.num_written_bytes,
        one.num_parts + other.num_parts,
        one.num_dropped_parts + other.num_dropped_parts,
        one.num_lost_tokens + other.num_lost_tokens,
        other.failure,
    )
