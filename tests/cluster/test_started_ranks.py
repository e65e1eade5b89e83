"""A cluster that cannot start leaves nothing that listens; NCCL needs a GPU for each rank."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from moe_serve.cluster import started_ranks
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.members.preflight import check_transport
from moe_serve.cluster.started_cells import build_cells
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.sections import TransportName
from moe_serve.errors import CheckpointError, ClusterError, ConfigError
from moe_serve.pipeline.timeline.timeline_file import TimelineWriter
from tests.support.cluster.cells_drive import cells_config
from tests.support.cluster.layouts import config, requests, serve
from tests.support.cluster.thread_starter import ThreadStarter

OF = config(1, 1)


class Stopped(ThreadStarter):
    """Counts how often it was stopped."""

    num_stops = 0

    def stop(self) -> None:
        self.num_stops += 1
        super().stop()


@pytest.fixture(autouse=True)
def _nobody_goes_on_listening() -> Iterator[None]:
    """Or a second attempt, with a better configuration, finds its port in use by the first."""
    before = threading.enumerate()
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert "control-listener" not in left


def raising(error: Exception) -> Any:
    def fail(*_: Any) -> None:
        raise error

    return fail


def test_a_configuration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = raising(ConfigError("the test refuses it"))
    monkeypatch.setattr(started_ranks, "check_next_layer", refuse)
    with pytest.raises(ConfigError, match="the test refuses it"):
        build_cluster(OF)


def test_a_timeline_cannot_be_written() -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        build_cluster(replace(OF, pipeline=replace(OF.pipeline, timeline="/nowhere/at/all.json")))


def test_there_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started_ranks, "StoreServer", raising(ClusterError("no store")))
    with pytest.raises(ClusterError, match="no store"):
        build_cluster(OF)


def test_a_checkpoint_that_cannot_be_read_stops_the_starter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On many nodes it has taken agents in by then: they would wait for ever."""
    made: list[Stopped] = []

    def make(*arguments: Any) -> Stopped:
        made.append(Stopped(*arguments))
        return made[0]

    monkeypatch.setattr(started_ranks, "PreflightRound", raising(CheckpointError("unreadable")))
    with pytest.raises(CheckpointError, match="unreadable"):
        build_cluster(OF, make_starter=make)
    assert made[0].num_stops == 1


def test_a_timeline_on_a_full_disk_keeps_nobody_from_ending(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "run.json"
    of = replace(OF, pipeline=replace(OF.pipeline, timeline=str(path)))
    engine = build_cluster(of, make_starter=ThreadStarter).engine
    monkeypatch.setattr(TimelineWriter, "_write_batch", fail)
    try:
        serve(engine, requests(2, 4096))
    finally:
        engine.close()
    assert f"the timeline {path} is incomplete, as it could not be written: No space" in caplog.text


OWN = {"attention-0": "GPU-a", "expert-0": "GPU-b"}
SHARED = {"attention-0": "GPU-a", "expert-0": "GPU-a"}
MIXED = {"attention-0": "GPU-a", "expert-0": "", "expert-1": ""}


@pytest.mark.parametrize("gpus", [SHARED, MIXED])
def test_what_nccl_refuses_the_others_do(gpus: Mapping[str, str]) -> None:
    def is_possible(wanted: TransportName) -> bool:
        try:
            check_transport(wanted, gpus)
        except ConfigError:
            return False
        return True

    found = {wanted: is_possible(wanted) for wanted in get_args(TransportName)}
    assert found == {"auto": True, "host": True, "nccl": False}


def test_nccl_wants_a_gpu_for_each() -> None:
    check_transport("nccl", OWN)
    with pytest.raises(ConfigError, match="attention-0 and expert-0 share a GPU"):
        check_transport("nccl", SHARED)
    with pytest.raises(ConfigError, match="and expert-0, expert-1 has no CUDA GPU"):
        check_transport("nccl", MIXED)


def test_a_cell_that_cannot_start_ends_the_start_of_the_others() -> None:
    """The others wait for ranks that never come, and the first failure is the one that is told."""

    class Absent(ThreadStarter):
        def start(self, rank: RankName) -> None: ...

    class Refused(ThreadStarter):
        def start(self, rank: RankName) -> None:
            raise ClusterError(f"{rank} has no place")

    starters = [Absent, Refused]
    with pytest.raises(ClusterError, match="attention-0 has no place"):
        build_cells(cells_config("2x(1A1E)"), starter_of=lambda cell: starters[cell.index])
