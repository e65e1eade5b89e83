"""The code around NCCL: order, ends, time-outs. gloo or a fake takes NCCL's place."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import moe_serve.pipeline.links.data_group as data_group
from moe_serve.pipeline.exchange.frame_layout import MaskedLayout
from moe_serve.pipeline.links.nccl_link import NcclGroups, gpu_of
from moe_serve.pipeline.links.transfer import PeerLostError
from tests.support.pipeline.exchange_pair import pair, whole_step
from tests.support.pipeline.gloo_as_nccl import put_gloo

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_experts", [1, 3])
def test_messages_without_tags(monkeypatch: pytest.MonkeyPatch, num_experts: int) -> None:
    put_gloo(monkeypatch)
    make = partial(data_group.DataGroup, transport="auto")
    with pair(MaskedLayout, num_experts=num_experts, make_group=make) as ranks:
        for number, rows in enumerate([[1], [6, 5, 4], [300, 2]]):
            whole_step(ranks, number, rows)


def test_host_memory_is_used_where_gpus_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_group, "gpu_of", lambda device: "GPU-0")
    groups: list[data_group.DataGroup] = []

    def make(*arguments: Any, **options: Any) -> data_group.DataGroup:
        groups.append(data_group.DataGroup(*arguments, transport="auto", **options))
        return groups[-1]

    with pair(MaskedLayout, num_experts=1, make_group=make):
        assert [group.is_nccl for group in groups] == [False, False]


def test_a_cpu_is_no_gpu() -> None:
    assert gpu_of(CPU) == ""


@dataclass(slots=True)
class FakeWork:
    """Ends after some calls."""

    polls_left: int
    error: str | None = None

    def wait(self) -> None:
        if self.error is not None:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        self.polls_left -= 1
        return self.polls_left < 0


@dataclass(slots=True)
class FakeGroup:
    """Gives out `works` in their order."""

    works: list[FakeWork]
    is_aborted: bool = False
    calls: list[tuple[str, int]] = field(default_factory=list)

    def send(self, buffers: list[Any], index: int, tag: int) -> FakeWork:
        self.calls.append(("send", index))
        return self.works.pop(0)

    def recv(self, buffers: list[Any], index: int, tag: int) -> FakeWork:
        self.calls.append(("recv", index))
        return self.works.pop(0)

    def abort(self) -> None:
        self.is_aborted = True


def groups_of(rows: FakeGroup, sums: FakeGroup, timeout_s: float = 30.0) -> NcclGroups:
    made = iter([rows, sums])
    return NcclGroups(HashStore(), 0, 2, CPU, timeout_s, lambda *_: next(made))


def test_rows_and_sums_have_a_communicator_each() -> None:
    rows, sums = FakeGroup([FakeWork(0)]), FakeGroup([FakeWork(3)])
    groups = groups_of(rows, sums)
    link = groups.link("expert-0", 1)
    buffer = torch.zeros(4, dtype=torch.uint8)
    link.send(buffer, 6, "rows of layer 3").wait()
    link.receive(buffer, 7, "sums of layer 3").wait()
    assert (rows.calls, sums.calls) == ([("send", 1)], [("recv", 1)])
    groups.settle()
    groups.settle()  # nothing is left


def test_a_silent_peer_is_given_up() -> None:
    rows, sums = FakeGroup([FakeWork(0)]), FakeGroup([FakeWork(1 << 40)])
    groups = groups_of(rows, sums, timeout_s=0.0)
    link = groups.link("expert-0", 1)
    buffer = torch.zeros(4, dtype=torch.uint8)
    link.send(buffer, 0, "rows")
    link.receive(buffer, 1, "sums")
    with pytest.raises(PeerLostError, match=r"expert-0 is lost \(sums\): silent for 0 s"):
        groups.settle()
    assert rows.is_aborted and sums.is_aborted, "kernels that wait on the GPU must end"
    with pytest.raises(PeerLostError, match="this epoch was given up"):
        link.send(buffer, 2, "more rows")


def test_an_error_names_peer_and_operation() -> None:
    groups = groups_of(FakeGroup([FakeWork(0, "NCCL error\nin a file")]), FakeGroup([]))
    transfer = groups.link("expert-4", 4).send(torch.zeros(4, dtype=torch.uint8), 0, "rows")
    with pytest.raises(PeerLostError, match=r"expert-4 is lost \(rows\): NCCL error$"):
        transfer.wait()
