"""Times exchanges of rows (T_c), and the ranks' own work for them, with the transport of the
server.

A second process is an expert rank without experts, which answers with zeros at once. So a layer
takes the handling on both sides and the time of two messages on their way. The CPU time of each
process gives its handling; the rest of the wall time is the way.

    python -m moe_serve.planning.exchange_timing JSON     the second process
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from experts.expert_stage import RoutedRows
from moe_serve.child_python import module_command
from moe_serve.cluster.control.meeting_store import StoreServer, connect_store
from moe_serve.cluster.control.secret import new_secret, secret_from_environment
from moe_serve.errors import ConfigError
from moe_serve.model.stage.attention_stage import Routed
from moe_serve.pipeline.exchange.expert_loop import ExpertLoop
from moe_serve.pipeline.exchange.group_transport import GroupTransport
from moe_serve.pipeline.exchange.row_split import RowSplit
from moe_serve.pipeline.exchange.step_shape import StepShape
from moe_serve.pipeline.frames.wire import WireFormat, make_wire_format
from moe_serve.pipeline.links.data_group import DataGroup
from moe_serve.pipeline.links.transfer import PeerLostError
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.planning.measure import usual

EXCHANGES = (1, 4, 16, 64, 128, 256, 512)  # rows
QUICK_EXCHANGES = (1, 16, 64, 256)
_HOST, _TIMEOUT_S = "127.0.0.1", 30.0
_START_TIMEOUT_S = 90.0  # for a process that imports torch on a busy machine
_ATTENTION, _EXPERT = "attention-0", "expert-0"
_LAYERS = tuple(range(16))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSetup:
    """The settings of both processes. `is_sharing`: through shared memory, else by gloo."""

    width: int
    top_k: int
    dtype: str
    rows: tuple[int, ...]
    num_steps: int  # for each number of rows
    is_sharing: bool
    port: int = 0

    @property
    def wire(self) -> WireFormat:
        return make_wire_format(self.width, self.top_k, getattr(torch, self.dtype), 1)


@dataclass(frozen=True, slots=True)
class ExchangeSample:
    """One layer's exchange. `num_bytes` is of a message, the mean of both ways. The times are those
    of the ranks' own cores, and of one message on its way."""

    num_bytes: float
    attention_s: float
    experts_s: float
    transfer_s: float


class _NoExperts:
    """Replaces an ExpertStage, and answers with zeros."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._zeros: dict[int, Tensor] = {}

    def partial(self, layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if len(x_TD) not in self._zeros:
            self._zeros[len(x_TD)] = torch.zeros(len(x_TD), self._width, dtype=torch.float64)
        return self._zeros[len(x_TD)]


def time_exchanges(setup: ExchangeSetup) -> list[ExchangeSample]:
    """Times the exchanges; raises ConfigError if the second process cannot be reached."""
    secret = new_secret()
    server = StoreServer(_HOST, 0, secret, _START_TIMEOUT_S)
    setup = replace(setup, port=server.port)
    command = module_command(__name__, json.dumps(asdict(setup)))
    peer = subprocess.Popen(command, env={**os.environ, **secret.environment()})
    try:
        store = connect_store(_HOST, server.port, secret, _START_TIMEOUT_S)
        try:
            store.wait(["ready"])  # its imports take seconds, longer than a group's meeting may
            group = _group(setup, _ATTENTION, _EXPERT, store)
            return _attention_side(setup, group, store)
        finally:
            store.close()
    except (PeerLostError, RuntimeError) as error:
        raise ConfigError(
            f"exchanges could not be measured between two processes of this machine: {error}"
        ) from error
    finally:
        peer.kill()
        peer.wait()
        server.close()


def _group(setup: ExchangeSetup, me: str, peer: str, store: Any) -> DataGroup:
    return DataGroup(
        [_ATTENTION, _EXPERT],
        me,
        [peer],
        store,
        epoch=1,
        host=_HOST,
        timeout_s=_TIMEOUT_S,
        device=torch.device("cpu"),
        is_sharing=setup.is_sharing,
    )


def _shapes(setup: ExchangeSetup) -> list[StepShape]:
    counts = [rows for rows in setup.rows for _ in range(setup.num_steps)]
    return [StepShape(1, step, ((count,),)) for step, count in enumerate(counts)]


@torch.inference_mode()
def _attention_side(setup: ExchangeSetup, group: DataGroup, store: Any) -> list[ExchangeSample]:
    transport = GroupTransport(
        group,
        attention_rank=0,
        expert_ranks=[_EXPERT],
        wire=setup.wire,
        split=RowSplit({}, 1),
        sparse_layers=_LAYERS,
        log=StageLog(),
    )
    try:
        clocks: dict[int, list[tuple[float, float, float]]] = {}
        for shape in _shapes(setup):
            count = shape.planned(0, 0, 0)
            routed = _rows(setup, count)
            wall, own = time.perf_counter(), time.process_time()
            transport.begin(shape)
            for layer in _LAYERS:
                transport.dispatch(layer, 0, routed)
                transport.combine(layer, 0)
            wall, own = time.perf_counter() - wall, time.process_time() - own
            theirs = float(store.get(f"own-{shape.step}"))
            clocks.setdefault(count, []).append((wall, own, theirs))
        return [_sample(setup, count, found) for count, found in clocks.items()]
    finally:
        transport.close()
        group.close()


def _rows(setup: ExchangeSetup, count: int) -> Routed:
    x_TD = torch.zeros(count, setup.width, dtype=getattr(torch, setup.dtype))
    ids_TK = torch.arange(setup.top_k).expand(count, -1).contiguous()
    return Routed(x_TD, RoutedRows(x_TD, ids_TK, torch.ones(count, setup.top_k)))


def _sample(
    setup: ExchangeSetup, count: int, clocks: Sequence[tuple[float, float, float]]
) -> ExchangeSample:
    """Returns the usual one of the steps' times, for one layer."""
    wall, own, theirs = (usual(column) / len(_LAYERS) for column in zip(*clocks, strict=True))
    wire = setup.wire
    return ExchangeSample(
        num_bytes=(wire.dispatch_bytes(count) + wire.combine_bytes(count)) / 2,
        attention_s=own,
        experts_s=theirs,
        transfer_s=max(0.0, wall - own - theirs) / 2,
    )


def _expert_side(setup: ExchangeSetup) -> None:
    torch.set_num_threads(1)
    store = connect_store(_HOST, setup.port, secret_from_environment(), _TIMEOUT_S)
    store.set("ready", "")
    group = _group(setup, _EXPERT, _ATTENTION, store)
    stage: Any = _NoExperts(setup.width)
    loop = ExpertLoop(
        group,
        stage,
        expert_rank=0,
        attention_ranks=[_ATTENTION],
        wire=setup.wire,
        sparse_layers=_LAYERS,
        log=StageLog(),
    )
    for shape in _shapes(setup):
        own = time.process_time()
        loop.run(shape)
        store.set(f"own-{shape.step}", str(time.process_time() - own))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    _expert_side(ExchangeSetup(**{**given, "rows": tuple(given["rows"])}))
