"""Streams requests through a cluster while its ranks fail, and checks the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from moe_serve.cluster.members.membership import Membership
from moe_serve.cluster.members.roster import RankPhase, RankState
from moe_serve.cluster.started_ranks import MakeStarter, build_cluster
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.cluster.steps.coordinator import Coordinator
from moe_serve.config.sections import CacheConfig, ClusterConfig, EngineConfig, SchedulerConfig
from moe_serve.engine.request.request import GenerationRequest
from tests.support.cluster.fault_starter import Faults, FaultStarter
from tests.support.cluster.layouts import Answer, config, requests, served_alone

DEADLINE_S = 100.0  # of anything in here; a hang is a failure, not a wait


def fault_config(attention: int, experts: int, **cluster: Any) -> EngineConfig:
    """Returns a configuration for eight streams. Closed connections reveal dead ranks; only a
    missing heartbeat reveals a frozen one, with a limit far above the delays of a busy machine."""
    of = config(attention, experts, 2)
    return replace(
        of,
        cache=CacheConfig(num_pages=256),
        scheduler=SchedulerConfig(max_num_seqs=8, max_batched_tokens=64),
        cluster=replace(of.cluster, **{"heartbeat_s": 5.0, "timeout_s": 30.0} | cluster),
    )


def undisturbed(of: EngineConfig, wanted: Sequence[GenerationRequest]) -> dict[str, Answer]:
    """Returns the answers of one process in which nothing fails."""
    return served_alone(replace(of, cluster=ClusterConfig()), wanted)


@dataclass(slots=True)
class Hurt:
    """When something was done to ranks, and when it was noticed and overcome."""

    at: float = 0.0
    detected: dict[str, float] = field(default_factory=dict)  # rank -> seconds later
    whys: dict[str, str] = field(default_factory=dict)  # rank -> what it was given up for
    served: float | None = None  # seconds later: the first tokens after the last detection

    def __str__(self) -> str:
        found = ", ".join(f"{name} detected after {s:.3f} s" for name, s in self.detected.items())
        served = "nothing served after it" if self.served is None else f"{self.served:.3f} s"
        return f"{found or 'nothing detected'}; serving again after {served}"


class FaultDrive:
    """A cluster whose losses are timed. Leave the `with`, and all ranks have ended."""

    def __init__(self, of: EngineConfig, make_starter: MakeStarter | None = None) -> None:
        built = build_cluster(of) if make_starter is None else build_cluster(
            of, make_starter=make_starter
        )  # fmt: skip
        assert isinstance(built.engine, ClusterEngine), "ranks were asked for"
        self.engine: ClusterEngine = built.engine
        self.adapters = built.adapters
        assert isinstance(self.engine._coordinator, Coordinator), (
            "the ranks are processes or threads"
        )
        self.coordinator: Coordinator = self.engine._coordinator
        self.membership: Membership = self.coordinator.membership
        self.hurt = Hurt()
        give_up = self.membership.give_up

        def noted(name: str, why: str) -> None:
            self.hurt.detected.setdefault(name, time.monotonic() - self.hurt.at)
            self.hurt.whys.setdefault(name, why)
            give_up(name, why)

        self.membership.give_up = noted  # type: ignore[method-assign]

    def __enter__(self) -> FaultDrive:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def state(self, name: str) -> RankState:
        return self.membership.roster[name]

    def pid(self, name: str) -> int:
        link = self.state(name).link
        assert link is not None and link.hello is not None, f"{name} is not there"
        return link.hello.pid

    @property
    def is_complete(self) -> bool:
        return all(s.phase is RankPhase.SERVING for s in self.membership.roster.all())

    def wait_until_complete(self) -> float:
        """Steps an idle engine until every rank is in the epoch -> seconds."""
        start = time.monotonic()
        while not self.is_complete or self.engine.has_work:
            assert time.monotonic() - start < DEADLINE_S, f"not back: {self.phases()}"
            self.engine.step()
        return time.monotonic() - start

    def phases(self) -> dict[str, str]:
        return {name: s.phase.value for name, s in self.membership.roster.states.items()}

    def serve(
        self,
        wanted: Sequence[GenerationRequest],
        hurt: Callable[[], None] | None = None,
        after_steps: int = 5,
    ) -> dict[str, Answer]:
        """Returns all answers. `hurt` is called once, when all streams run and some steps were
        made."""
        answers = {request.request_id: Answer() for request in wanted}
        for request in wanted:
            self.engine.add(request)
        num_steps, end = 0, time.monotonic() + DEADLINE_S
        self.hurt = Hurt(at=time.monotonic())
        while any(answer.end is None for answer in answers.values()):
            assert time.monotonic() < end, f"hangs: {self.phases()}, {self.hurt}"
            if num_steps == after_steps and hurt is not None:
                self.hurt = Hurt(at=time.monotonic())
                hurt()
            deltas = self.engine.step()
            num_steps += 1
            for delta in deltas:
                answers[delta.request_id].take(delta)
            if deltas and self.hurt.detected and self.hurt.served is None:
                self.hurt.served = time.monotonic() - self.hurt.at
        self.engine.check_integrity()
        return answers


VOCAB_SIZE = 4096  # of the demonstration model
OF = fault_config(2, 3)
WANTED = requests(8, VOCAB_SIZE, num_tokens=10)


@contextmanager
def driven(faults: Faults, of: EngineConfig = OF) -> Iterator[tuple[FaultDrive, FaultStarter]]:
    """Yields a cluster of threads, and the starter of its ranks."""
    made: list[FaultStarter] = []

    def make(*arguments: Any) -> FaultStarter:
        made.append(FaultStarter(faults, *arguments))
        return made[0]

    with FaultDrive(of, make) as drive:
        try:
            yield drive, made[0]
        finally:
            faults.thawed.set()


def assert_recovers(
    drive: FaultDrive,
    expected: dict[str, Answer],
    num_lost: int | None = None,
    wanted: Sequence[GenerationRequest] = WANTED,
) -> None:
    """Checks that the cluster serves during the fault, and again when all ranks are back."""
    before = drive.membership.num_lost
    assert drive.serve(wanted) == expected, "a token changed"
    if num_lost is not None:
        assert drive.membership.num_lost == before + num_lost
    drive.wait_until_complete()
    again = {request.request_id: expected[request.request_id] for request in wanted[:4]}
    assert drive.serve(wanted[:4]) == again, "a token changed after the recovery"
    stats = drive.engine.stats()
    assert stats.load.num_free_pages == stats.load.num_pages, "every page is free again"
