"""Recorded decode steps give the same answers as steps without a recording; when none is
recorded."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import pytest
import torch

from moe_kernels.graphs.graph_recorder import Addresses, EagerRecorder, EagerRecording
from moe_kernels.graphs.graph_sizes import GraphSize
from moe_kernels.kernel_choice import KernelsName
from moe_serve.cli.serve.service import describe_layout
from moe_serve.config.sections import EngineConfig, ModelConfig, SchedulerConfig
from moe_serve.engine.execute import cuda_graphs
from moe_serve.errors import ConfigError
from moe_serve.offline.llm import LLM
from tests.engine.test_invariance import content, prompts_and_params
from tests.support.kernels.kernel_sets import KERNEL_SETS, make_kernels

CPU = torch.device("cpu")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> EagerRecorder:
    """The recorder of every engine of the test, whatever its device and kernels."""
    made = EagerRecorder()
    monkeypatch.setattr(cuda_graphs, "capture_refusal", lambda *_: None)
    monkeypatch.setattr(cuda_graphs, "make_recorder", lambda _: made)
    return made


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_joins_leaves_and_preemptions(
    tiny: str, kernels: KernelsName, recorder: EagerRecorder
) -> None:
    """21 requests share 9 seats and a small pool: batches have all sizes, with prompts in
    between."""
    prompts, params = prompts_and_params(21)
    params = [dataclasses.replace(p, max_tokens=4 + i % 9) for i, p in enumerate(params)]
    results = []
    for is_off in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if is_off:
                patch.setattr(cuda_graphs, "capture_refusal", lambda *_: "off for this test")
            with LLM(
                tiny, kernels=kernels, num_pages=14, max_model_len=160, max_num_seqs=9,
                max_batched_tokens=48,
            ) as llm:  # fmt: skip
                outputs = llm.generate(prompts, params, use_progress_bar=False)
                assert llm.stats().counts.num_preemptions > 0, "the pool was meant to be too small"
            results.append([content(output) for output in outputs])
        if not is_off:
            assert recorder.num_recordings == 5, "1, 2, 4, 8 and 9 rows of up to 160 keys"
            assert recorder.num_replays > 20, f"{recorder.num_replays} steps were replayed"
            num_replays = recorder.num_replays
    assert recorder.num_replays == num_replays, "the second engine was meant to have none"
    assert results[0] == results[1]


class FailingRecording(EagerRecording):
    """Fails at its third replay, and at every later one."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.num_calls = 0

    def replay(self) -> None:
        super().replay()
        self.num_calls += 1
        if self.num_calls > 2:
            raise RuntimeError("an illegal address, as CUDA would say")


@pytest.mark.faults
def test_a_fault_in_a_replay_is_the_last(
    tiny: str,
    recorder: EagerRecorder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts, params = prompts_and_params(4)
    with LLM(tiny) as llm:
        expected = [content(o) for o in llm.generate(prompts, params, use_progress_bar=False)]

    def record(function: Callable[[], None], fixed: Addresses) -> FailingRecording:
        return FailingRecording(recorder, function, fixed)

    monkeypatch.setattr(recorder, "record", record)
    recorder.num_replays = 0
    with LLM(tiny, prefix_cache=False) as llm:
        found = [content(o) for o in llm.generate(prompts, params, use_progress_bar=False)]
    assert found == expected
    faults = [r.message for r in caplog.records if "illegal address" in r.message]
    assert len(faults) == 1 and "steps now run without graphs" in faults[0], faults
    assert 2 <= recorder.num_replays < 10, f"{recorder.num_replays} replays"


class NoMemory(EagerRecorder):
    """Fails to record a second graph."""

    def record(self, function: Callable[[], None], fixed: Addresses) -> EagerRecording:
        if self.num_recordings:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().record(function, fixed)


@pytest.mark.faults
def test_without_memory_auto_runs_on_and_on_is_refused(
    tiny: str,
    recorder: EagerRecorder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cuda_graphs, "make_recorder", lambda _: NoMemory())
    with caplog.at_level(logging.WARNING), LLM(tiny) as llm:
        assert llm.layout.cuda_graphs == "off: capturing failed (CUDA out of memory)"
        assert "run without: CUDA out of memory" in caplog.text
    with pytest.raises(ConfigError, match="capturing failed .CUDA out of memory."):
        LLM(tiny, cuda_graphs="on")


def test_on_is_refused_where_nothing_can_be_captured(tiny: str) -> None:
    with pytest.raises(
        ConfigError, match="'on', but CUDA graphs need a CUDA GPU, and the device is cpu"
    ):
        LLM(tiny, cuda_graphs="on")
    with LLM(tiny) as llm:
        assert llm.layout.cuda_graphs is None, "a CPU has nothing to say of them"
        assert "graphs" not in describe_layout(llm.layout)


def test_why_nothing_is_captured() -> None:
    cuda, kernels = torch.device("cuda"), make_kernels("torch", torch.float32)
    assert "the kernels are torch" in str(cuda_graphs.capture_refusal(kernels, cuda, 1))

    class Capturable:
        name, can_be_captured = "triton", True

    made: object = Capturable()
    assert cuda_graphs.capture_refusal(made, cuda, 1) is None  # type: ignore[arg-type]
    assert "2 micro-batches" in str(cuda_graphs.capture_refusal(made, cuda, 2))  # type: ignore[arg-type]
    assert "device is cpu" in str(cuda_graphs.capture_refusal(made, CPU, 1))  # type: ignore[arg-type]


def test_what_is_recorded_is_said(tiny: str, recorder: EagerRecorder) -> None:
    with LLM(tiny, max_num_seqs=3, max_model_len=500) as llm:
        said = str(llm.layout.cuda_graphs)
        assert said.startswith("3 for 1, 2, 3 rows x 500 keys a row (0 MiB, captured in"), said
        assert describe_layout(llm.layout)["graphs"] == said
    assert recorder.num_replays == 0
    with LLM(tiny, cuda_graphs="off") as llm:
        assert llm.layout.cuda_graphs is None


@pytest.mark.parametrize(
    ("seqs", "tokens", "most", "expected"),
    [(9, 64, None, (1, 2, 4, 8, 9)), (64, 3, None, (1, 2, 3)), (64, 1024, 16, (1, 2, 4, 8, 16))],
)
def test_sizes_follow_the_limits(
    seqs: int, tokens: int, most: int | None, expected: tuple[int, ...]
) -> None:
    config = EngineConfig(
        model=ModelConfig(cuda_graph_max_rows=most),
        scheduler=SchedulerConfig(max_num_seqs=seqs, max_batched_tokens=tokens),
    )
    sizes = cuda_graphs.graph_sizes(config, 600)
    assert sizes == [GraphSize(rows, keys) for rows in expected for keys in (512, 600)]
