"""Measures what parcels under way cost the exchanges between attention and expert ranks of a cell.

    python benchmarks/run.py exchanges --steps 3000

A rank sends the pages of a prompt of 8192 tokens to an attention rank, again and again with pauses.
The attention rank exchanges rows with an expert rank without experts all the time, a step of 16
layers after the other, and obeys the orders about parcels between two steps. An exchange counts as
beside a parcel if one is being taken when it begins and when it ends, and as alone if none has been
for a while.

Two times are printed: that of the clock, which needs a core for each of the four processes and one
for the thread that takes parcels, and the processor time of the thread that exchanges rows, which
does not. The last line is for how long orders about parcels hold the rank between two steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import psutil
import torch

from cells.parcels import Rank, RankOfPages, carrier_of, carry
from harness.environment import write_report
from moe_serve.child_python import module_command
from moe_serve.cluster.control.meeting_store import StoreServer, connect_store
from moe_serve.cluster.control.secret import new_secret
from moe_serve.config.cells import CellsConfig
from moe_serve.pipeline.exchange.group_transport import GroupTransport
from moe_serve.pipeline.exchange.row_split import RowSplit
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.planning import exchange_timing
from moe_serve.planning.exchange_timing import ExchangeSetup

_PAGES = 512
_QUIET_S = 0.05
_WAIT_S = 90.0


@dataclass(slots=True)
class Times:
    """Nanoseconds of each exchange: by the clock, and of the thread."""

    wall: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)


@contextmanager
def exchanging(setup: ExchangeSetup) -> Iterator[GroupTransport]:
    """Yields the transport of an attention rank whose expert rank is another process."""
    secret = new_secret()
    server = StoreServer("127.0.0.1", 0, secret, _WAIT_S)
    setup = replace(setup, port=server.port)
    command = module_command(exchange_timing.__name__, json.dumps(asdict(setup)))
    peer = subprocess.Popen(command, env={**os.environ, **secret.environment()})
    store = connect_store("127.0.0.1", server.port, secret, _WAIT_S)
    store.wait(["ready"])
    names = exchange_timing._ATTENTION, exchange_timing._EXPERT
    group = exchange_timing._group(setup, *names, store)
    yield GroupTransport(
        group,
        attention_rank=0,
        expert_ranks=names[1:],
        wire=setup.wire,
        split=RowSplit({}, 1),
        sparse_layers=exchange_timing._LAYERS,
        log=StageLog(),
    )
    group.close()
    peer.kill()
    peer.wait()
    store.close()
    server.close()


@torch.inference_mode()
def exchange(setup: ExchangeSetup, ended: Event, out: str, rank: Rank, pipe: Connection) -> None:
    """Exchanges rows for all steps, writes the times to a file, and then obeys orders until the
    pipe closes."""
    pages = RankOfPages(rank, pipe)
    taker = pages.parcels._taker
    found, held, last_order = {"alone": Times(), "beside": Times()}, list[int](), 0.0
    with exchanging(setup) as transport:
        for shape in exchange_timing._shapes(setup):
            routed = exchange_timing._rows(setup, shape.planned(0, 0, 0))
            transport.begin(shape)
            for layer in exchange_timing._LAYERS:
                was_busy = taker is not None and taker.is_busy
                wall, own = time.perf_counter_ns(), time.thread_time_ns()
                transport.dispatch(layer, 0, routed)
                transport.combine(layer, 0)
                wall, own = time.perf_counter_ns() - wall, time.thread_time_ns() - own
                is_busy = taker is not None and taker.is_busy
                is_quiet = time.monotonic() - last_order > _QUIET_S
                if was_busy and is_busy:
                    found["beside"].wall.append(wall)
                    found["beside"].own.append(own)
                elif is_quiet and not was_busy and not is_busy:
                    found["alone"].wall.append(wall)
                    found["alone"].own.append(own)
            while pipe.poll(0):
                own, last_order = time.thread_time_ns(), time.monotonic()
                pages.obey()
                held.append(time.thread_time_ns() - own)
    alone, beside = (np.array([found[name].wall, found[name].own]) for name in ("alone", "beside"))
    np.savez(out, held=np.array(held), alone=alone, beside=beside)
    ended.set()
    pages.obey_all()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16, help="rows of an exchange")
    parser.add_argument("--steps", type=int, default=3000, help="of 16 layers each")
    parser.add_argument("--pause", type=float, default=0.4, help="seconds between two prompts")
    parser.add_argument("--link", default="shared")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    busy_cores = psutil.cpu_percent(interval=1.0) / 100 * (psutil.cpu_count() or 1)
    print(f"{busy_cores:.1f} cores of {psutil.cpu_count()} were busy")
    setup = ExchangeSetup(
        width=1024,
        top_k=8,
        dtype="bfloat16",
        rows=(options.rows,),
        num_steps=options.steps,
        is_sharing=True,
    )
    ended = multiprocessing.get_context("spawn").Event()
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/times.npz"
        target = functools.partial(exchange, setup, ended, out)
        with carrier_of(CellsConfig(link=options.link), _PAGES, "auto", target) as (carrier, _):
            number = 0
            while not ended.is_set():
                carry(carrier, _PAGES, number)
                number += 1
                ended.wait(options.pause)
        with np.load(out) as file:
            found, held = {name: file[name] for name in ("alone", "beside")}, file["held"]
    report: dict[str, object] = {"busy_cores": busy_cores, "num_prompts": number}
    for name, times in found.items():
        if not times.size:
            raise SystemExit(f"no exchange was {name}: use more --steps or another --pause.")
        wall, own = ([f"{1e-3 * np.percentile(each, q):.0f}" for q in (50, 99)] for each in times)
        print(
            f"{name:7} {len(times[0]):6} exchanges: P50 and P99 {wall[0]} and {wall[1]} us, "
            f"of the thread {own[0]} and {own[1]} us"
        )
        report[name] = {"wall_ns": times[0].tolist(), "thread_ns": times[1].tolist()}
    for q in (50, 99):
        ratios = [np.percentile(b, q) / np.percentile(a, q)
                  for a, b in zip(found["alone"], found["beside"], strict=True)]  # fmt: skip
        print(f"P{q} beside parcels over alone: {ratios[0]:.2f}, of the thread {ratios[1]:.2f}")
    print(f"an order about parcels holds the rank for {1e-6 * float(np.mean(held)):.2f} ms of it")
    write_report(options.json, report)
    return 0
