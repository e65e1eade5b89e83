"""The disk tier behind ranks under faults: kills at random moments, and a matrix of damage."""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from unittest import mock

import psutil

from harness.environment import child_environment
from kv_tiers.rank_tiers import (
    answers_of,
    model_config,
    opened_ranks,
    request_of,
    tier_of,
    until_stored,
)
from moe_serve.cache.tiers.segment import Segment
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.config.sections import CacheConfig, EngineConfig
from moe_serve.engine.build import build_engine

_KNOWN = [request_of(200, seed, num_tokens=12) for seed in range(4)]
_WORKER = "from kv_tiers.rank_faults import work; work()"
_FIELDS = {  # offsets in a slot
    "magic": 0, "version": 8, "tokens": 12, "generation": 16, "key": 24, "parent key": 56,
    "geometry": 88, "length": 120, "digest": 128, "written": 160, "expires": 168, "HMAC": 176,
    "first byte": 4096, "a later byte": 4096 + 40_000,
}  # fmt: skip


_EMPTY = ("EIO when writing", "full disk", "read-only disk")  # nothing is on the disk before


def expected_answers(arguments: argparse.Namespace) -> dict[str, list[int]]:
    """Returns the answers of one process without a tier."""
    engine = build_engine(EngineConfig(model=model_config(arguments))).engine
    try:
        return answers_of(engine, _KNOWN)
    finally:
        engine.close()


def work() -> None:
    """Serves with ranks until it is killed. Prints the processes of the ranks, and then the answers
    to the known requests again and again; other requests run beside them."""
    arguments = argparse.Namespace(**json.loads(sys.argv[1]))
    cache = CacheConfig(
        disk_path=arguments.path, memory_tier_bytes=2**25, checkpoint_after_s=0.05, num_pages=128
    )
    engine = opened_ranks(arguments, cache, num_attention=2)
    assert isinstance(engine, ClusterEngine), "ranks were asked for"
    links = {s.name: s.link for s in engine._coordinator.membership.roster.all()}
    pids = {f"{n}": link.hello.pid for n, link in links.items() if link and link.hello}
    print(json.dumps(pids), flush=True)
    for turn in itertools.count():
        seed = 1000 * arguments.seed + 10 * turn
        others = [request_of(180, 100_000 + seed + i, 6, f"other {i}") for i in range(3)]
        told = answers_of(engine, [*_KNOWN, *others])
        print(json.dumps({each.request_id: told[each.request_id] for each in _KNOWN}), flush=True)


@dataclass(slots=True)
class Kills:
    """Collects what happened to servers that were killed."""

    expected: dict[str, list[int]]
    by_victim: dict[str, int] = field(default_factory=dict)
    num_failed: int = 0  # starts
    num_wrong: int = 0
    num_answers: int = 0

    def check(self, line: str) -> bool:
        """Compares a line of a worker. False if it has ended."""
        if not line.endswith("\n"):
            return False
        self.num_answers += len(self.expected)
        self.num_wrong += json.loads(line) != self.expected
        return True

    def round(self, worker: subprocess.Popen[str], chance: random.Random) -> bool:
        """Kills one process of a server. After a rank the server must go on, until it is killed
        itself. False if it did not start."""
        assert worker.stdout is not None, "the output is a pipe"
        pids: dict[str, int] = json.loads(worker.stdout.readline() or "{}")
        if not pids or not self.check(worker.stdout.readline()):
            self.num_failed += 1
            worker.kill()
            worker.communicate()
            return False
        victim = chance.choice(["coordinator", *pids])
        self.by_victim[victim] = self.by_victim.get(victim, 0) + 1
        time.sleep(chance.uniform(0.0, 2.0))
        if victim != "coordinator":
            os.kill(pids[victim], signal.SIGKILL)
            for _ in range(2):  # the first line may have been made before
                self.num_failed += not self.check(worker.stdout.readline())
            time.sleep(chance.uniform(0.0, 1.0))
        worker.send_signal(signal.SIGKILL)
        rest, _ = worker.communicate()
        for line in rest.splitlines(keepends=True):
            self.check(line)
        _wait_for(pids.values())
        return True


def _started(
    arguments: argparse.Namespace, folder: Path, seed: int, log: IO[str]
) -> subprocess.Popen[str]:
    options = {"model": arguments.model, "threads": 1, "path": str(folder), "seed": seed}
    environment = child_environment()
    paths = [str(Path(__file__).resolve().parents[1]), environment["PYTHONPATH"]]
    return subprocess.Popen(
        [sys.executable, "-c", _WORKER, json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        text=True,
    )


def rank_kills(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Kills coordinators and ranks at random moments; every server must start, and answer as one
    process without a tier does."""
    kills, chance = Kills(expected_answers(arguments)), random.Random(7)
    for number in range(arguments.kills):
        with tempfile.TemporaryFile("w+") as log:
            worker = _started(arguments, folder, number, log)
            if not kills.round(worker, chance):
                log.seek(0)
                print(log.read()[-2000:])
        if number % 10 == 9:
            print(
                f"{number + 1} kills: {kills.num_failed} failed, {kills.num_wrong} wrong",
                flush=True,
            )
    print(f"2A1E, {arguments.kills} kills ({kills.by_victim}): {kills.num_failed} failed, "
          f"{kills.num_wrong} wrong of {kills.num_answers} answers")  # fmt: skip
    return {
        "kills": kills.by_victim, "failed": kills.num_failed, "wrong": kills.num_wrong,
        "answers": kills.num_answers,
    }  # fmt: skip


def _wait_for(pids: Iterable[int]) -> None:
    """Waits until the ranks of a killed coordinator have ended, as they do by themselves."""
    deadline = time.monotonic() + 60
    while any(map(_is_running, pids)):
        assert time.monotonic() < deadline, "ranks outlive their coordinator"
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def rank_faults(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Damages the folder of 1A1E, or has its disk fail; all answers must be right."""
    expected, template = expected_answers(arguments), folder / "template"
    folder.mkdir()
    _answers(arguments, template)
    results: dict[str, object] = {}
    for name, damage in _damages().items():
        where = folder / "damaged"
        shutil.copytree(template, where)
        damage(where)
        results[name] = _judged(name, arguments, where, expected, contextlib.nullcontext())
        shutil.rmtree(where)
    for name, fault in _failures().items():
        where = folder / "failing"
        if name not in _EMPTY:
            shutil.copytree(template, where)
        results[name] = _judged(name, arguments, where, expected, fault(where))
        shutil.rmtree(where, ignore_errors=True)
    wrong = sum(result != "right" for result in results.values())
    print(f"1A1E, {len(results)} faults: {wrong} with wrong answers, errors or failed starts")
    return results


def _judged(
    name: str,
    arguments: argparse.Namespace,
    folder: Path,
    expected: dict[str, list[int]],
    fault: contextlib.AbstractContextManager[Any],
) -> str:
    try:
        told, seconds, loads = _answers(arguments, folder, fault)
        result = "right" if told == expected else "wrong"
    except Exception as error:
        result, seconds, loads = f"failed: {error}", 0.0, {}
    print(f"  {name}: {result}, {seconds:.2f} s; {loads}", flush=True)
    return result


def _answers(
    arguments: argparse.Namespace,
    folder: Path,
    fault: contextlib.AbstractContextManager[Any] | None = None,
) -> tuple[dict[str, list[int]], float, dict[str, int]]:
    """Returns the answers of ranks, with a fault while they answer, the seconds that they took, and
    the pages that were loaded."""
    cache = CacheConfig(disk_path=str(folder), memory_tier_bytes=2**25)
    engine = opened_ranks(arguments, cache)
    try:
        with fault or contextlib.nullcontext():
            begin = time.perf_counter()
            told = answers_of(engine, _KNOWN)
            seconds = time.perf_counter() - begin
            until_stored(engine)
        tier = tier_of(engine)
        return told, seconds, {**tier.loads, **tier.saves}
    finally:
        engine.close()


def _damages() -> dict[str, Callable[[Path], object]]:
    """Returns what is done to a folder before a server starts on it."""

    def flip(offset: int) -> Callable[[Path], None]:
        def damage(folder: Path) -> None:
            (path,) = folder.glob("*/*.kv")
            segment = bytearray(path.read_bytes())
            slot_bytes = int.from_bytes(segment[16:24], "little")
            for at in range(4096 + offset, len(segment), slot_bytes):
                segment[at] ^= 1
            path.write_bytes(segment)

        return damage

    def cut(folder: Path) -> None:
        (path,) = folder.glob("*/*.kv")
        os.truncate(path, 4096 + 100_000)

    def replace_key(folder: Path) -> None:
        (path,) = folder.glob("*/mac.key")
        path.write_bytes(os.urandom(32))

    def flip_head(folder: Path) -> None:
        (path,) = folder.glob("*/*.kv")
        with path.open("r+b") as file:
            file.write(b"?")

    damages = {f"flipped bit in {name}": flip(offset) for name, offset in _FIELDS.items()}
    return damages | {
        "flipped head of the file": flip_head,
        "truncated file": cut,
        "key of another server": replace_key,
        "no key": lambda folder: next(folder.glob("*/mac.key")).unlink(),
        "no file": lambda folder: next(folder.glob("*/*.kv")).unlink(),
    }


def _failures() -> dict[str, Callable[[Path], contextlib.AbstractContextManager[Any]]]:
    """Returns what fails while a server answers."""

    def failing(
        method: str, number: int
    ) -> Callable[[Path], contextlib.AbstractContextManager[Any]]:
        error = OSError(number, os.strerror(number))
        return lambda _: mock.patch.object(Segment, method, side_effect=error)

    def stalled(_: Path) -> contextlib.AbstractContextManager[Any]:
        real = Segment.read

        def read(segment: Segment, slot: int) -> Any:
            time.sleep(30)
            return real(segment, slot)

        return mock.patch.object(Segment, "read", read)

    @contextlib.contextmanager
    def removed(folder: Path) -> Iterator[None]:
        shutil.rmtree(folder)
        yield

    return {
        "EIO when reading": failing("read", errno.EIO),
        "EIO when writing": failing("write", errno.EIO),
        "full disk": failing("make", errno.ENOSPC),
        "read-only disk": failing("make", errno.EROFS),
        "reads take 30 s": stalled,
        "removed folder": removed,
    }
