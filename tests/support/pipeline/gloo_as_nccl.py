"""gloo in place of NCCL, so that the code around NCCL's calls runs on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import pytest

from moe_serve.pipeline.links import data_group
from moe_serve.pipeline.links.gloo_link import make_group
from moe_serve.pipeline.links.nccl_link import NcclGroups


@dataclass(slots=True)
class GlooWork:
    """Adapts gloo's work, which reports its state only after a wait, and allows one wait."""

    work: Any
    has_ended: bool = False

    def wait(self) -> None:
        if not self.has_ended:
            self.work.wait()
        self.has_ended = True

    def is_completed(self) -> bool:
        self.wait()
        return True


class GlooGroup:
    """Adapts gloo to NCCL's interface: the only tag is 0."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._group = make_group(store, rank, size, "127.0.0.1", timeout_s)

    def send(self, buffers: list[Any], index: int, tag: int) -> GlooWork:
        assert tag == 0, "NCCL has no tags"
        return GlooWork(self._group.send(buffers, index, tag))

    def recv(self, buffers: list[Any], index: int, tag: int) -> GlooWork:
        assert tag == 0, "NCCL has no tags"
        return GlooWork(self._group.recv(buffers, index, tag))

    def abort(self) -> None:
        self._group = None


def put_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every rank report a GPU of its own, and uses gloo in place of NCCL."""
    numbers = count()
    monkeypatch.setattr(data_group, "gpu_of", lambda device: f"GPU-{next(numbers)}")
    monkeypatch.setattr(data_group, "NcclGroups", partial(NcclGroups, make_group=GlooGroup))
