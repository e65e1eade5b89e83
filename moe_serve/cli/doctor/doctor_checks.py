"""Judges the findings of `doctor`: fine, a warning, or a problem that prevents serving."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_serve.cli.doctor.machine import MachineReport
from moe_serve.cli.doctor.machine_limits import Fact

CheckState = Literal["ok", "warning", "problem"]

NUM_STREAMS = 500  # that a server should be able to hold open
_OWN_FILES = 128  # of the process itself: weights, sockets, logs
_LEAST_FILES = 128
_SHARED_MEMORY_BYTES = 64 * 2**20  # frames of a few ranks
_LEAST_PYTHON = (3, 10)
_NEEDED = ("torch",)
_USEFUL = {"llguidance": "structured output", "native kernels": "fast CPU kernels"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One result. `text` is one sentence; for a problem or a warning it says what to do."""

    name: str
    state: CheckState
    text: str


def machine_checks(report: MachineReport) -> list[Check]:
    sections = report.sections
    checks = [_python(), *_backends(report), _open_files(sections["limits"])]
    checks += [_shared_memory(sections["limits"]), _port(sections["network"])]
    checks += [_clock(sections["clock"])]
    return checks


def has_problem(checks: Sequence[Check]) -> bool:
    return any(check.state == "problem" for check in checks)


def _python() -> Check:
    version, least = sys.version_info[:2], ".".join(map(str, _LEAST_PYTHON))
    is_old = version < _LEAST_PYTHON
    text = f"Python is {version[0]}.{version[1]}" + (
        f"; install {least} or newer." if is_old else ""
    )
    return Check(name="python", state="problem" if is_old else "ok", text=text)


def _backends(report: MachineReport) -> list[Check]:
    known = {backend.name: backend for backend in report.backends}
    checks = []
    for name in _NEEDED:
        backend = known.get(name)
        is_missing = backend is not None and not backend.is_on
        text = backend.reason if backend is not None and is_missing else "can be imported"
        checks.append(Check(name=name, state="problem" if is_missing else "ok", text=text))
    for name, use in _USEFUL.items():
        if name in known and not known[name].is_on:
            text = f"without it there is no {use}: {known[name].reason}"
            checks.append(Check(name=name, state="warning", text=text))
    return checks


def _open_files(limits: Mapping[str, Fact]) -> Check:
    number, name = limits["open_files"], "open files"
    if not isinstance(number, int):
        return Check(name=name, state="ok", text="no limit")
    wanted = NUM_STREAMS + _OWN_FILES
    if number >= wanted:
        return Check(name=name, state="ok", text=f"{number}, enough for {NUM_STREAMS} streams")
    state: CheckState = "problem" if number < _LEAST_FILES else "warning"
    room = max(0, number - _OWN_FILES)
    text = (
        f"{number} open files are allowed, which is enough for {room} streams: raise the limit "
        f"(`ulimit -n {wanted}` or more)."
    )
    return Check(name=name, state=state, text=text)


def _shared_memory(limits: Mapping[str, Fact]) -> Check:
    free, name = limits["shared_memory_free_bytes"], "shared memory"
    if not isinstance(free, int):
        return Check(name=name, state="ok", text="no /dev/shm: ranks of a host use sockets")
    if free >= _SHARED_MEMORY_BYTES:
        return Check(name=name, state="ok", text=f"{free / 2**30:.1f} GiB are free")
    text = (
        f"{free / 2**20:.0f} MiB are free in /dev/shm, through which ranks of one host "
        f"exchange data: give it {_SHARED_MEMORY_BYTES // 2**20} MiB or more (docker run "
        "--shm-size)."
    )
    return Check(name=name, state="warning", text=text)


def _port(network: Mapping[str, Fact]) -> Check:
    is_usable = network["port"] in ("free", "any free one")
    text = f"{network['listen']} is {network['port']}"
    if not is_usable:
        text += ": choose another with --port."
    return Check(name="port", state="ok" if is_usable else "warning", text=text)


def _clock(clock: Mapping[str, Fact]) -> Check:
    if clock["synchronised"] is False:
        text = (
            "the clock is not synchronised, according to the kernel: times in the logs of "
            "several hosts may differ."
        )
        return Check(name="clock", state="warning", text=text)
    known = "synchronised" if clock["synchronised"] else "it is unknown whether it is synchronised"
    return Check(name="clock", state="ok", text=f"{clock['utc']} UTC, {known}")
