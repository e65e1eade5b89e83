"""A listener on loopback, closed with everything that came through it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster.control_pair import Cluster, open_cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with open_cluster() as opened:
        yield opened
