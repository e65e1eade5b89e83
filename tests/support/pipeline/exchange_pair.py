"""Attention and expert ranks as threads around their own ends of the data plane."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore

from experts.expert_stage import RoutedRows
from moe_serve.model.stage.attention_stage import Routed
from moe_serve.pipeline.exchange.expert_loop import ExpertLoop
from moe_serve.pipeline.exchange.frame_layout import FrameLayout
from moe_serve.pipeline.exchange.group_transport import GroupTransport
from moe_serve.pipeline.exchange.row_split import RowSplit
from moe_serve.pipeline.exchange.step_shape import StepShape
from moe_serve.pipeline.frames.wire import WireFormat, make_wire_format
from moe_serve.pipeline.links.data_group import DataGroup
from moe_serve.pipeline.timeline.stage_log import StageLog

WIDTH, TOP_K, NUM_EXPERTS, LAYERS = 8, 2, 4, (0, 1, 2)
CPU = torch.device("cpu")


class Sums:
    """A stand-in for ExpertStage: an expert's output is its number + 1 times the row. Values are
    whole numbers, so sums are exact in any order."""

    def __init__(self) -> None:
        self.failing_layer: int | None = None
        self.foreseen: list[tuple[int, int, list[int] | None]] = []

    def foresee(self, layer: int, micro_batch: int, following_E: Tensor | None) -> None:
        told = None if following_E is None else following_E.tolist()
        self.foreseen.append((layer, micro_batch, told))

    def partial(self, layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if layer == self.failing_layer:
            raise RuntimeError("no such luck")
        factors_T = (torch.where(ids_TK < 0, 0, ids_TK + 1) * weights_TK).sum(1)
        return x_TD.double() * factors_T[:, None]


@dataclass(slots=True)
class Pair:
    """One attention rank and some expert ranks, which hold equal runs of experts."""

    transport: GroupTransport
    loops: Sequence[ExpertLoop]
    stages: Sequence[Sums]
    pool: ThreadPoolExecutor

    def step(self, number: int, rows: Sequence[int], act: Callable[[], Any]) -> Any:
        """Runs `act` on the attention side while the others serve a step."""
        shape = StepShape(1, number, (tuple(rows),))
        futures = [self.pool.submit(loop.run, shape) for loop in self.loops]
        self.transport.begin(shape)
        try:
            return act()
        finally:
            for future in futures:
                future.result(20.0)


def routed(num_rows: int, seed: int) -> Routed:
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randint(-9, 9, (num_rows, WIDTH), generator=generator).float()
    weights_TK = torch.randint(1, 5, (num_rows, TOP_K), generator=generator).float()
    order = torch.rand(num_rows, NUM_EXPERTS, generator=generator).argsort(1)
    ids_TK = order[:, :TOP_K].sort(1).values
    return Routed(x_TD, RoutedRows(x_TD, ids_TK, weights_TK))


def expected(layer: int, rows: Routed) -> Tensor:
    sent = rows.rows
    return Sums().partial(layer, sent.x_TD, sent.expert_ids_TK, sent.weights_TK).float()


def whole_step(ranks: Pair, number: int, rows: list[int]) -> None:
    """Runs all layers and micro-batches, and compares each with the result of one process."""
    transport = ranks.transport

    def act() -> None:
        for layer in LAYERS:
            sent = [routed(count, 10 * number + layer) for count in rows]
            for micro_batch, each in enumerate(sent):
                transport.dispatch(layer, micro_batch, each)
            for micro_batch, each in enumerate(sent):
                got = transport.combine(layer, micro_batch)
                assert torch.equal(got, expected(layer, each)), f"layer {layer}"
        transport.finish()

    ranks.step(number, rows, act)


@contextmanager
def pair(
    make_layout: Callable[[torch.device], FrameLayout],
    *,
    num_experts: int,
    make_group: Callable[..., DataGroup] = DataGroup,
    num_foreseen: int = 0,
) -> Iterator[Pair]:
    names = [f"expert-{index}" for index in range(num_experts)]
    members, store = ["attention-0", *names], HashStore()

    def group(me: str, peers: list[str]) -> DataGroup:
        return make_group(
            members, me, peers, store, epoch=1, host="127.0.0.1", timeout_s=60.0, device=CPU
        )

    with ThreadPoolExecutor(num_experts + 1) as pool:
        met = [pool.submit(group, name, ["attention-0"]) for name in names]
        mine = group("attention-0", names)
        groups = [future.result(60.0) for future in met]
        wire: WireFormat = make_wire_format(
            WIDTH, TOP_K, torch.float32, num_experts, num_foreseen=num_foreseen
        )
        owner = [[expert * num_experts // NUM_EXPERTS] for expert in range(NUM_EXPERTS)]
        split = RowSplit(dict.fromkeys(LAYERS, owner), num_experts)
        stages = [Sums() for _ in names]
        transport = GroupTransport(
            mine,
            attention_rank=0,
            expert_ranks=names,
            wire=wire,
            split=split,
            sparse_layers=LAYERS,
            log=StageLog(),
            layout=make_layout(CPU),
        )
        loops = []
        for index, (one, stage) in enumerate(zip(groups, stages, strict=True)):
            any_stage: Any = stage
            loops.append(
                ExpertLoop(
                    one,
                    any_stage,
                    expert_rank=index,
                    attention_ranks=["attention-0"],
                    wire=wire,
                    sparse_layers=LAYERS,
                    log=StageLog(),
                    layout=make_layout(CPU),
                )
            )
        try:
            yield Pair(transport, loops, stages, pool)
        finally:
            transport.close()
            for loop in loops:
                loop.close()
            for one in (mine, *groups):
                one.close()
