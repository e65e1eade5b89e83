"""Drafts change no token in any layout."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.sections import EngineConfig, SpeculationConfig, SpeculationMethod
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.execute.step_outcome import StepOutcome
from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.errors import ConfigError, MoeServeError
from moe_serve.model.step_plan import StepPlan
from tests.cluster.test_lost_moments import lose_after
from tests.support.cluster.fault_drive import FaultDrive, undisturbed
from tests.support.cluster.layouts import Answer, colocated, config, requests, serve
from tests.support.cluster.thread_starter import ThreadStarter

VOCAB_SIZE = 4096  # of the demonstration model


def wanted(num_tokens: int = 16) -> list[GenerationRequest]:
    """Long enough to repeat themselves; one follows a grammar."""
    asked = requests(6, VOCAB_SIZE, num_tokens=num_tokens)
    form = Constraint("regex", r'\{"first_name": "[a-z]+", "family_name": "[a-z]+"\}')
    asked[1] = replace(
        asked[1], params=replace(asked[1].params, constraint=form, max_tokens=num_tokens + 16)
    )
    return asked


def drafting(of: EngineConfig, *, is_adaptive: bool = False) -> EngineConfig:
    return replace(of, speculation=SpeculationConfig(method="auto", is_adaptive=is_adaptive))


def twice(engine: DrivenEngine, asked: Sequence[GenerationRequest]) -> list[dict[str, Answer]]:
    """The answers to requests, and to the same ones again, when their answers are known."""
    first = serve(engine, asked)
    again = [replace(r, request_id=f"again-{r.request_id}") for r in asked]
    found = {k.removeprefix("again-"): answer for k, answer in serve(engine, again).items()}
    return [first, found]


def test_one_process() -> None:
    of = config(0, 0, 1)
    expected = colocated(of, wanted())
    for is_adaptive in (False, True):
        engine = build_engine(drafting(of, is_adaptive=is_adaptive)).engine
        if is_adaptive:  # measured times decide
            assert serve(engine, wanted()) == expected
        else:
            assert twice(engine, wanted()) == [expected, expected]
            counts = engine.stats().counts.drafts
            assert {"suffix", "grammar"} <= counts.by_source.keys(), f"{counts}"
            assert counts.total.num_accepted > 30, f"{counts}"


@pytest.mark.parametrize(
    ("attention", "experts", "cluster"), [(1, 1, {}), (2, 2, {}), (1, 1, {"router": "experts"})]
)
def test_ranks(attention: int, experts: int, cluster: dict[str, object]) -> None:
    of = config(attention, experts, 2, **cluster)
    expected = colocated(of, wanted())
    engine = build_cluster(drafting(of), make_starter=ThreadStarter).engine
    try:
        assert twice(engine, wanted()) == [expected, expected]
        counts = engine.stats().counts.drafts
        assert {"suffix", "grammar"} <= counts.by_source.keys(), f"{counts}"
    finally:
        engine.close()


def test_a_trained_head() -> None:
    """In one process and on ranks, where the head runs beside the sampler."""
    alone, ranks = config(0, 0, 1), config(1, 1, 2)
    expected = colocated(alone, wanted())
    for of, build in ((alone, build_engine), (ranks, build_on_threads)):
        section = SpeculationConfig(method="head", is_adaptive=False)
        engine = build(replace(of, speculation=section)).engine
        try:
            assert serve(engine, wanted()) == expected
            counts = engine.stats().counts.drafts.by_source["head"]
            assert counts.num_accepted > 5, f"{counts}"
        finally:
            engine.close()


def build_on_threads(config: EngineConfig) -> BuiltEngine:
    return build_cluster(config, make_starter=ThreadStarter)


def test_a_head_that_cannot_be_used(tmp_path: Path) -> None:
    def refusal(of: EngineConfig, head: str) -> str:
        section = SpeculationConfig(method="head", head=head)
        with pytest.raises(MoeServeError) as raised:
            build_engine(replace(of, speculation=section))
        return str(raised.value)

    why = refusal(config(0, 0, 1), str(tmp_path))
    assert f"speculation.head is '{tmp_path}'" in why and "cannot be read" in why


@pytest.mark.parametrize(
    ("method", "cluster", "why"),
    [
        ("self", {}, "needs all experts in the process that samples"),
        ("head", {"attention_tp": 2}, "cluster.attention_tp is 2: set it to 1, or use 'auto'"),
    ],
)
def test_a_method_that_ranks_cannot_run(
    method: SpeculationMethod, cluster: dict[str, object], why: str
) -> None:
    of = replace(config(2, 1, **cluster), speculation=SpeculationConfig(method=method))
    with pytest.raises(ConfigError, match=why):
        build_on_threads(of)


@pytest.mark.parametrize("share", [None, 0.5])
def test_the_model_itself(share: float | None) -> None:
    """With all experts in memory, and with half of them. Also with few pages."""
    of, asked = config(0, 0, 1), wanted(num_tokens=24)
    expected = colocated(of, asked)
    section = SpeculationConfig(method="self", is_adaptive=False, self_experts=2)
    if share is not None:
        num_bytes = int(share * 6 * 32 * 3 * 256 * 96 * 2)
        of = replace(of, model=replace(of.model, expert_memory_bytes=num_bytes))
    engine = build_engine(replace(of, speculation=section)).engine
    try:
        if share is None:
            assert twice(engine, asked) == [expected, expected]
        else:  # every draft of it loads experts again, which takes long
            assert serve(engine, asked) == expected
        counts = engine.stats().counts.drafts.by_source["self"]
        assert counts.num_accepted > 30, f"{counts}"
        load = engine.stats().load
        assert load.num_free_pages == load.num_pages, "no page is kept for drafts"
    finally:
        engine.close()


@pytest.mark.faults
def test_lost_ranks_and_failed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is lost while drafts are in flight, and steps with drafts fail."""
    run, numbers = LocalExecutor.run, itertools.count(1)

    def run_or_fail(
        self: LocalExecutor, plan: StepPlan, sequences: Mapping[int, EngineSequence]
    ) -> StepOutcome:
        if any(piece.num_drafted for piece in plan.slices) and next(numbers) % 4 == 0:
            raise RuntimeError("this step with drafts fails")
        return run(self, plan, sequences)

    of, asked = config(2, 1), wanted(num_tokens=24)
    expected = undisturbed(of, asked)
    monkeypatch.setattr(LocalExecutor, "run", run_or_fail)
    with FaultDrive(drafting(of), ThreadStarter) as drive:
        assert drive.serve(asked) == expected
        lose_after(drive, 6, "attention-1")
        again = [replace(r, request_id=f"again-{r.request_id}") for r in asked]
        found = {k.removeprefix("again-"): answer for k, answer in drive.serve(again).items()}
        assert found == expected
        assert drive.membership.num_lost == 1
        assert next(numbers) > 8, "some steps with drafts failed"
