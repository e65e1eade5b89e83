"""A listener on loopback, closed with everything that came through it, and faults of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster.control_pair import Cluster, open_cluster
from tests.support.cluster.fault_starter import Faults


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with open_cluster() as opened:
        yield opened


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    made = Faults(monkeypatch)
    yield made
    made.thawed.set()
