"""Measures how fast KV pages move from one attention rank to another, over each link.

    python benchmarks/run.py parcels --rounds 5

Two processes have the pages of two attention ranks, with the shapes of the 1.26 B benchmark model,
and no weights. A prompt of 8192 tokens moves as a whole, and then its last chunk alone: the part
that a hand-over waits for, because the pages before it travel while the prompt is computed. The
processor time of the two ranks says what the link costs on a machine that has other work, too; that
of their main threads is what holds their steps.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec
import psutil
import torch

from harness.environment import write_report
from harness.machine import measure_limits
from moe_kernels.interface.kv_form import kv_form
from moe_serve.cache.kv_cache import KVCache
from moe_serve.cache.transfer.wire_pages import WirePages
from moe_serve.cluster.control.messages import Loaded, Order, Report
from moe_serve.cluster.control.parcel_messages import ParcelFacts, ParcelOrder, ParcelSetup
from moe_serve.cluster.control.secret import cluster_secret
from moe_serve.cluster.parcels.link_setup import LinkSetup
from moe_serve.cluster.parcels.parcel import Lease, Parcel, RankPlace
from moe_serve.cluster.parcels.rank_carrier import RankCarrier
from moe_serve.cluster.ranks.rank_parcels import ParcelMemories, RankHome, RankParcels
from moe_serve.config.cells import CellsConfig
from moe_serve.config.sections import ModelConfig
from moe_serve.engine.opened_model import LoadReport, ServedCheckpoint
from moe_serve.model.spec import ModelSpec

_PAGE_SIZE, _TIMEOUT_S = 16, 60.0
_LAYERS, _HEADS, _HEAD_DIM = 16, 4, 64  # of scripts/make_random_model.py
_PLACES = (RankPlace(0, "attention-0", 1), RankPlace(1, "attention-0", 1))
_ENCODER, _ORDERS = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Order)
_REPORTS = msgspec.msgpack.Decoder(Report)


@dataclass(frozen=True, slots=True)
class Rank:
    """Tells a process of the benchmark what to do."""

    setup: ParcelSetup
    num_pages: int
    kv_dtype: str


def spec() -> ModelSpec:
    """Returns a model with the benchmark model's KV pages."""
    demo = ServedCheckpoint.read(ModelConfig()).spec
    shape = replace(demo.attention, num_heads=16, num_kv_heads=_HEADS, head_dim=_HEAD_DIM)
    return replace(demo, layers=(replace(demo.layers[0], attention=shape),) * _LAYERS)


class RankOfPages:
    """A rank's pages and parcels, in its own process. Orders come through a pipe."""

    def __init__(self, rank: Rank, pipe: Connection) -> None:
        torch.set_num_threads(1)
        self._pipe, self._lock = pipe, threading.Lock()
        cpu, form = torch.device("cpu"), kv_form(rank.kv_dtype)  # type: ignore[arg-type]
        cache = KVCache(spec(), rank.num_pages, _PAGE_SIZE, torch.bfloat16, cpu, form)
        for part in cache.parts:
            part.fill_(1)
        home = RankHome("127.0.0.1", cluster_secret("b" * 40, "the benchmark"), self._tell)
        wire = WirePages(cache, _HEADS)
        memories = ParcelMemories(rank.setup)
        self.parcels = RankParcels(memories, wire, _PAGE_SIZE, None, home, b"", _TIMEOUT_S)
        pipe.send_bytes(_ENCODER.encode(self.parcels.facts))

    def obey(self) -> None:
        """Waits for an order and obeys it. Raises EOFError when there will be no more."""
        report = self.parcels.handle(_ORDERS.decode(self._pipe.recv_bytes()))
        if report is not None:
            self._tell(report)

    def obey_all(self) -> None:
        """Obeys orders until there will be no more, and ends the rank."""
        with contextlib.suppress(EOFError):
            while True:
                self.obey()
        self.parcels.close()

    def _tell(self, report: Report) -> None:
        with self._lock:
            self._pipe.send_bytes(_ENCODER.encode(report))


def live(rank: Rank, pipe: Connection) -> None:
    """Obeys orders until the pipe closes, as a rank does between its steps."""
    RankOfPages(rank, pipe).obey_all()


class PipedRanks:
    """Implements CellRanks for the two processes."""

    def __init__(self, pipes: list[Connection]) -> None:
        self.pipes = pipes
        decode = msgspec.msgpack.Decoder(ParcelFacts).decode
        report = LoadReport(
            kernels="",
            num_threads=1,
            dtype="bfloat16",
            device="cpu",
            weight_format="",
            expert_weights="",
        )
        self.facts = [decode(pipe.recv_bytes()) for pipe in pipes]
        self._loaded = [
            Loaded(weights_hash="", report=report, load_seconds=0.0, parcels=facts)
            for facts in self.facts
        ]

    def loaded(self, place: RankPlace) -> Loaded | None:
        return self._loaded[place.cell]

    def send(self, place: RankPlace, order: ParcelOrder) -> None:
        self.pipes[place.cell].send_bytes(_ENCODER.encode(order))


@contextlib.contextmanager
def carrier_of(
    config: CellsConfig,
    num_pages: int,
    kv_dtype: str,
    target: Callable[[Rank, Connection], None] = live,
) -> Iterator[tuple[RankCarrier, list[psutil.Process]]]:
    """Yields the carrier and the processes of the two ranks. `target`: what the second one does."""
    context, link = multiprocessing.get_context("spawn"), LinkSetup(config)
    pairs = [context.Pipe() for _ in _PLACES]
    rank = Rank(link.setup, num_pages, kv_dtype)
    lives = (live, target)
    processes = [
        context.Process(target=each, args=(rank, far))
        for each, (_, far) in zip(lives, pairs, strict=True)
    ]
    for process in processes:
        process.start()
    for _, far in pairs:
        far.close()
    ranks = PipedRanks([near for near, _ in pairs])
    carrier = RankCarrier(config, ranks, ranks.facts[0].page_bytes, _TIMEOUT_S)
    assert not (why := carrier.can_carry(*_PLACES)), why
    yield carrier, [psutil.Process(process.pid) for process in processes]
    for near, _ in pairs:
        near.close()
    for process in processes:
        process.join()
    link.close()


def carry(carrier: RankCarrier, num_pages: int, number: int) -> float:
    """Moves so many pages; returns the seconds from the first order to the last end."""
    pages, begin = list(range(1, num_pages + 1)), time.perf_counter()
    lease, ranks = Lease(number, number), carrier._ranks
    assert isinstance(ranks, PipedRanks), "the benchmark's own"
    num_open = 0
    while pages or num_open:
        while pages and (free := carrier.num_free(_PLACES[1])):
            count = min(free, carrier.pages_per_parcel, len(pages))
            some, pages = tuple(pages[:count]), pages[count:]
            carrier.send(
                Parcel(
                    lease=lease,
                    number=0,
                    source=_PLACES[0],
                    target=_PLACES[1],
                    source_pages=some,
                    target_pages=some,
                )
            )
            num_open += 1
        for pipe in wait(ranks.pipes):
            cell = ranks.pipes.index(pipe)  # type: ignore[arg-type]
            carrier.heard(_PLACES[cell], _REPORTS.decode(ranks.pipes[cell].recv_bytes()))
        for end in carrier.take_ended():
            assert end.is_sound, end.why
            num_open -= 1
    return time.perf_counter() - begin


def busy_s(processes: list[psutil.Process]) -> list[float]:
    """Returns the processor time that each process has had, and then that of each main thread."""
    whole = [process.cpu_times() for process in processes]
    mains = [one for each in processes for one in each.threads() if one.id == each.pid]
    busy = [float(each.user + each.system) for each in whole]
    return busy + [float(each.user_time + each.system_time) for each in mains]


def in_4_mib_ms(seconds_per_gb: float) -> float:
    """Returns the time of a parcel of 4 MiB."""
    return seconds_per_gb * 4 * 2**20 / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of its last chunk")
    parser.add_argument("--kv-dtype", default="auto", choices=["auto", "int8", "int4"])
    parser.add_argument("--links", nargs="+", default=["shared", "tcp"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    limits = measure_limits(1)
    print(f"memory: {limits.read_gb_s:.1f} GB/s read; {limits.busy_cores:.1f} cores were busy")
    whole, last = (tokens // _PAGE_SIZE for tokens in (arguments.tokens, arguments.chunk))
    report: dict[str, object] = {"read_gb_s": limits.read_gb_s, "busy_cores": limits.busy_cores}
    for link in arguments.links:
        with carrier_of(CellsConfig(link=link), whole, arguments.kv_dtype) as (carrier, ranks):
            num_bytes = carrier.page_bytes
            carry(carrier, whole, 0)  # touches the memory
            before = busy_s(ranks)
            times = [carry(carrier, whole, i + 1) for i in range(arguments.rounds)]
            busy = [b - a for a, b in zip(before, busy_s(ranks), strict=True)]
            exposed = [carry(carrier, last, i + 1000) for i in range(4 * arguments.rounds)]
        size = whole * num_bytes / 1e9
        rate, best = size / statistics.median(times), size / min(times)
        costs = [each / arguments.rounds / size for each in busy]
        print(
            f"{link}: {whole} pages of {num_bytes} bytes, {rate:.2f} GB/s (best {best:.2f}); "
            f"the last {arguments.chunk} tokens: {1e3 * statistics.median(exposed):.1f} ms "
            f"(best {1e3 * min(exposed):.1f}); processor time {costs[0]:.2f} s/GB at the source, "
            f"{costs[1]:.2f} at the target; of 4 MiB their main threads have "
            f"{in_4_mib_ms(costs[2]):.1f} and {in_4_mib_ms(costs[3]):.1f} ms"
        )
        report[link] = {
            "page_bytes": num_bytes,
            "whole_s": times,
            "last_chunk_s": exposed,
            "busy_s_per_gb": costs,
        }
    write_report(arguments.json, report)
    return 0
