"""Counts the memory that a store takes for every page on the disk, in a process that has only it.

Pages of random content are written, and of every two one is read, on a folder that becomes full, so
that pages get second chances. Memory is looked at when nothing is queued. What the allocator has
handed out and what it keeps, though it was freed, tell where memory is.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from harness.environment import child_environment
from moe_serve.cache.tiers.disk_folder import DiskFolder, StoreIdentity
from moe_serve.cache.tiers.disk_space import DiskLimits
from moe_serve.cache.tiers.disk_store import DiskStore
from moe_serve.cache.tiers.slot import slot_bytes
from moe_serve.cache.tiers.store import SavedPage

_NUM_LOOKS = 12
_IDLE_S = 1.3  # until the memory of written pages has gone back to the system
_FULL = 0.6  # of the pages that are written, those that the folder has room for


@dataclass(frozen=True, slots=True)
class Look:
    """The memory of the process when nothing is queued."""

    num_stored: int  # so far
    num_pages: int  # in the index
    own_bytes: int  # memory of the process that is no file's
    most_bytes: int  # the largest since the last look
    used_bytes: int  # handed out by the C allocator
    kept_bytes: int  # freed, and kept by it


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    ]


def page_memory(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Prints the memory for every page, until the folder is full and afterwards."""
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = child_environment() | {"PYTHONPATH": os.pathsep.join(paths)}
    code = "import sys; from kv_tiers.page_memory import main; main(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(folder), str(arguments.written)]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    looks = [Look(**row) for row in json.loads(output)]
    first, last = looks[1], looks[-1]  # after the queue was full once
    full = max(looks, key=lambda look: look.num_pages)
    for look in looks:
        print(f"{look.num_stored:7} stored, {look.num_pages:7} in the index: "
              f"{look.own_bytes / 2**20:.1f} MiB, at most {look.most_bytes / 2**20:.1f}; allocator "
              f"{look.used_bytes / 2**20:.1f} and {look.kept_bytes / 2**20:.1f} kept")  # fmt: skip
    per_page = (full.own_bytes - first.own_bytes) / (full.num_pages - first.num_pages)
    growth = last.own_bytes - full.own_bytes
    print(f"until the folder is full: {per_page:.0f} bytes a page; after that "
          f"{last.num_stored - full.num_stored} pages: {growth / 2**20:.2f} MiB")  # fmt: skip
    return {"bytes_per_page": per_page, "growth": growth, "looks": [asdict(each) for each in looks]}


def main(folder: str, num_stored: str) -> None:
    """Writes pages in this process, and prints the looks at its memory as JSON."""
    page_bytes, count, rng = 49152, int(num_stored), np.random.default_rng(0)
    bound = int(_FULL * count) * slot_bytes(page_bytes)
    store = DiskStore(
        DiskFolder.claim(Path(folder)),
        DiskLimits(max_bytes=bound, min_free_bytes=0),
        page_bytes=page_bytes,
        geometry=b"0" * 32,
        identify=lambda: StoreIdentity(b"0" * 32, {}),
    )
    while not store.stats().is_reading:
        time.sleep(0.01)
    content = rng.integers(0, 256, page_bytes, dtype=np.uint8)
    looks, most, every = list[Look](), 0, max(1, count // _NUM_LOOKS)
    names = rng.bytes(32 * count)  # at once, so that the keys kept here do not count
    for number in range(count):
        while store.room <= 0:
            time.sleep(0.001)
        data = store.buffer()
        data[:] = content
        store.save(SavedPage(names[32 * number : 32 * number + 32], b"p" * 32, 16, data))
        if number % 2:
            store.load(number, [names[32 * (back := int(rng.integers(number))) : 32 * back + 32]])
            store.take_done()
        if number % 64 == 0:
            most = max(most, _own_bytes())
        if number % every == every - 1:
            looks.append(_look(store, number + 1, most))
            most = 0
    print(json.dumps([asdict(each) for each in looks]))
    store.close(10.0)


def _look(store: DiskStore, num_stored: int, most: int) -> Look:
    while store.stats().num_queued:
        time.sleep(0.002)
    time.sleep(_IDLE_S)
    store.take_done()
    gc.collect()
    used = kept = 0
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = _Mallinfo
        info = libc.mallinfo2()
        used, kept = info.uordblks + info.hblkhd, info.fordblks
    return Look(num_stored, store.stats().num_pages, _own_bytes(), most, used, kept)


def _own_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status has no RssAnon: this part needs Linux")
