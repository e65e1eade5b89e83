"""T_c: one message between two processes of this machine, over torch.distributed.

    python -m moe_serve.cluster.transfer_timing PORT     the other process: sends back what comes

gloo over loopback, or NCCL between two GPUs where there are two. Listens on 127.0.0.1 only.
"""

from __future__ import annotations

import datetime
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from moe_serve.cluster.stopwatch import usual
from moe_serve.errors import ConfigError

dist: Any = torch.distributed  # its process groups are not in its stubs
_HOST = "127.0.0.1"
_TIMEOUT = datetime.timedelta(seconds=30)
SIZES = (64, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304)
QUICK_SIZES = (64, 4096, 65536, 1048576)


@dataclass(frozen=True, slots=True)
class TransferSample:
    """`seconds`: from one process to the other. `own_seconds`: CPU time that sending and receiving
    one message takes of a process that has a single core."""

    num_bytes: int
    seconds: float
    own_seconds: float


def time_transfers(sizes: tuple[int, ...], seconds_each: float) -> list[TransferSample]:
    """Raises ConfigError if the second process cannot be reached."""
    listening = socket.create_server((_HOST, 0))
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        _HOST,
        port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    peer = subprocess.Popen([sys.executable, "-m", __name__, str(port)])
    try:
        group = _group(store, 0)
        return [_time_size(group, size, seconds_each) for size in sizes]
    except RuntimeError as error:
        raise ConfigError(
            f"transfers could not be measured between two processes on {_HOST}: {error}"
        ) from error
    finally:
        peer.kill()  # it waits for another size
        peer.wait()


def backend_name() -> str:
    return "nccl" if _has_nccl() else "gloo"


def _has_nccl() -> bool:
    return torch.cuda.device_count() > 1 and bool(dist.is_nccl_available())


def _device(rank: int) -> torch.device:
    return torch.device(f"cuda:{rank}") if _has_nccl() else torch.device("cpu")


def _group(store: Any, rank: int) -> Any:
    if _has_nccl():
        torch.cuda.set_device(rank)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_HOST)]
    options._timeout = _TIMEOUT
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _exchange(group: Any, tag: int, tensor: torch.Tensor) -> None:
    """To the other process, from rank 0."""
    group.send([tensor], 1, tag).wait()
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _time_size(group: Any, size: int, seconds: float) -> TransferSample:
    _exchange(group, 0, torch.tensor([size], dtype=torch.int64, device=_device(0)))
    out = torch.zeros(size, dtype=torch.uint8, device=_device(0))
    back = torch.empty_like(out)

    def round_trip() -> None:
        receiving = group.recv([back], 1, 2)
        group.send([out], 1, 1).wait()
        receiving.wait()
        if out.is_cuda:
            torch.cuda.synchronize(out.device)

    times, own = _repeat(round_trip, seconds)
    out.fill_(1)  # asks the other process for the next size
    round_trip()
    return TransferSample(size, times / 2, own / 2)


def _repeat(round_trip: Callable[[], None], seconds: float) -> tuple[float, float]:
    """The usual seconds of a round trip  and of this process's CPU in it."""
    for _ in range(3):
        round_trip()
    times: list[float] = []
    own: list[float] = []
    while len(times) < 5 or (sum(times) < seconds and len(times) < 500):
        start, cpu = time.perf_counter(), time.process_time()
        round_trip()
        times.append(time.perf_counter() - start)
        own.append(time.process_time() - cpu)
    return usual(times), min(sum(own) / len(own), usual(times))


def _echo(port: int) -> None:
    """Sizes from rank 0, then messages of that size until one begins with 1; until it is killed."""
    group = _group(dist.TCPStore(_HOST, port, is_master=False, timeout=_TIMEOUT), 1)
    size = torch.zeros(1, dtype=torch.int64, device=_device(1))
    while True:
        group.recv([size], 0, 0).wait()
        buffer = torch.zeros(int(size), dtype=torch.uint8, device=_device(1))
        while not int(buffer[0]):
            group.recv([buffer], 0, 1).wait()
            group.send([buffer], 0, 2).wait()


if __name__ == "__main__":
    _echo(int(sys.argv[1]))
