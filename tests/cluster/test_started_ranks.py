"""Where a cluster cannot start, nothing of it goes on listening."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from layouts import config
from moe_serve.cluster import build, started_ranks
from moe_serve.cluster.build import build_cluster
from moe_serve.errors import ClusterError, ConfigError

OF = config(1, 1)


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
    monkeypatch.setattr(build, "check_next_layer", raising(ConfigError("the test refuses it")))
    with pytest.raises(ConfigError, match="the test refuses it"):
        build_cluster(OF)


def test_a_timeline_cannot_be_written() -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        build_cluster(replace(OF, pipeline=replace(OF.pipeline, timeline="/nowhere/at/all.json")))


def test_there_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started_ranks, "serve_store", raising(ClusterError("no store")))
    with pytest.raises(ClusterError, match="no store"):
        build_cluster(OF)
