"""The order in which a CUDA graph is made, with a stand-in for torch.cuda: no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moe_kernels.graphs import graph_recorder
from moe_kernels.graphs.graph_recorder import CudaRecorder

DEVICE = torch.device("cuda:1")


class FakeStream:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def replay(self) -> None:
        self.log.append("replay")


class FakeCuda:
    """The members of torch.cuda that the recorder uses."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.free = 1000
        self.current = FakeStream(self.log, "main")

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        return FakeStream(self.log, "side")

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802
        return FakeGraph(self.log)

    def current_stream(self, device: torch.device) -> FakeStream:
        assert device == DEVICE, f"asked for {device}"
        return self.current

    def graph_pool_handle(self) -> str:
        return "pool"

    def empty_cache(self) -> None:
        self.log.append("empty cache")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 2000

    def synchronize(self, device: torch.device) -> None:
        self.log.append("synchronize")

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        assert device == DEVICE, f"work for {device}"
        yield

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append(f"on {stream.name}")
        try:
            yield
        finally:
            self.log.append(f"off {stream.name}")

    @contextmanager
    def graph(
        self, graph: FakeGraph, *, pool: str, stream: FakeStream, capture_error_mode: str
    ) -> Iterator[None]:
        self.log.append(f"capture on {stream.name} from {pool}, {capture_error_mode}")
        yield
        self.free -= 300
        self.log.append("captured")


def test_warm_up_then_capture_then_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(graph_recorder.torch, "cuda", fake)
    recorder = CudaRecorder(DEVICE)
    recording = recorder.record(lambda: fake.log.append("step"), lambda: [])
    assert fake.log == [
        "empty cache",
        "on main", "side waits for main",
        "on side", "step", "step", "off side", "main waits for side", "synchronize",
        "capture on side from pool, thread_local", "step", "captured", "off main",
    ]  # fmt: skip
    fake.log.clear()
    recording.replay()
    assert fake.log == ["replay"], "a replay runs nothing of the host's"
    assert recorder.num_bytes == 300


def test_a_capture_that_fails_gives_the_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(graph_recorder.torch, "cuda", fake)

    def step() -> None:
        if fake.log[-1].startswith("capture"):
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaRecorder(DEVICE).record(step, lambda: [])
    assert fake.log[-1] == "off main", f"{fake.log}"


def test_memory_of_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_recorder.torch, "cuda", FakeCuda())
    with pytest.raises(AssertionError, match="the GPU's memory"):
        CudaRecorder(DEVICE).record(lambda: None, lambda: [torch.zeros(1)])
