"""Finds absent ranks, and ranks that do not fit the others, before anything is loaded.

A rank reports the marks of its checkpoint files and the ports it can reach (`examine`). The rest is
pure: it works on the ranks' reports. One problem is one sentence, which names all ranks that share
it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal

import torch

from moe_serve import __version__
from moe_serve.cache.page_key import add_weight_file
from moe_serve.cluster.control.messages import Examine, Examined, FileMark, Hello
from moe_serve.cluster.control.probe import ProbeResult, ProbeTarget, probe
from moe_serve.config.sections import TransportName
from moe_serve.errors import CheckpointError, ConfigError
from moe_serve.regular_file import is_there, regular_file

Kind = Literal["absent", "unexpected", "version", "file", "port"]
_SHOWN_DIGITS = 12  # digits of a hash
CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "*.safetensors"


def file_marks(folder: Path) -> list[FileMark]:
    """Returns the marks of config.json, the index and every weight file; raises CheckpointError.

    A mark is a file's size and a hash, compared before loading. Small files are hashed whole; of
    weight files the header and samples are hashed. That is enough to tell another revision or an
    unfinished copy in milliseconds. A few flipped bits are found by the hash of the loaded weights.
    Missing files are left out: the comparison names them.
    """
    try:
        small = [path for name in (CONFIG, INDEX) if is_there(path := folder / name)]
        return [_mark(path) for path in (*small, *sorted(folder.glob(WEIGHTS)))]
    except OSError as error:
        where = error.filename or folder
        raise CheckpointError(f"cannot read {where}: {error.strerror or error}.") from error


def _mark(path: Path) -> FileMark:
    digest = sha256()
    if path.suffix == ".json":
        digest.update(regular_file(path).read_bytes())
    else:
        add_weight_file(digest, path)
    return FileMark(name=path.name, size=path.stat().st_size, digest=digest.hexdigest())


def versions() -> dict[str, str]:
    """Returns the versions that must be equal on all ranks. The handshake checks the protocol's
    own."""
    return {"moe-serve": __version__, "torch": str(torch.__version__)}


def examine(order: Examine) -> Examined:
    probes = probe(order.targets, order.timeout_s)
    try:
        return Examined(files=file_marks(Path(order.folder)), probes=probes)
    except CheckpointError as error:
        return Examined(files=(), probes=probes, why=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRank:
    """A rank that should come, and the node (as the user named it) that should start it."""

    name: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The versions, files and port probes of one rank. Others are compared with the
    coordinator's."""

    name: str
    host: str
    versions: dict[str, str]  # package, or protocol -> version
    files: tuple[FileMark, ...] = ()
    probes: tuple[ProbeResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`text` is one sentence for the user; `ranks` are the ranks it is about."""

    kind: Kind
    text: str
    ranks: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return self.text


def find_problems(
    expected: Sequence[ExpectedRank],
    reports: Sequence[RankReport],
    coordinator: RankReport,
    waited_s: float,
) -> list[Problem]:
    """Returns the problems that keep the ranks from working together; empty if they can begin."""
    return [
        *absent_ranks(expected, reports, waited_s),
        *unexpected_ranks(expected, reports),
        *version_differences(reports, coordinator),
        *file_differences(reports, coordinator),
        *closed_ports([coordinator, *reports]),
    ]


def absent_ranks(
    expected: Sequence[ExpectedRank], reports: Sequence[RankReport], waited_s: float
) -> Iterator[Problem]:
    """Yields a problem for each node with absent ranks; a node without any rank is one sentence."""
    came = {report.name for report in reports}
    by_node: dict[str, list[str]] = defaultdict(list)
    for rank in expected:
        by_node[rank.node].append(rank.name)
    for node, names in by_node.items():
        absent = tuple(name for name in names if name not in came)
        if not absent:
            continue
        if len(absent) == len(names):
            text = f"no rank of {node} reported within {waited_s:g} s: {_listed(absent)}."
        else:
            some = f"{len(names) - len(absent)} of the {len(names)} ranks of {node} reported"
            text = f"{some} within {waited_s:g} s; missing: {_listed(absent)}."
        yield Problem(kind="absent", text=text, ranks=absent)


def unexpected_ranks(
    expected: Sequence[ExpectedRank], reports: Sequence[RankReport]
) -> Iterator[Problem]:
    """Yields ranks of another layout, and ranks that were started twice."""
    known = {rank.name for rank in expected}
    for name, count in Counter(report.name for report in reports).items():
        hosts = _listed(sorted({report.host for report in reports if report.name == name}))
        if name not in known:
            text = f"{name} reported from {hosts}, but is not part of this layout."
        elif count > 1:
            text = f"{name} reported {count} times, from {hosts}: start each rank only once."
        else:
            continue
        yield Problem(kind="unexpected", text=text, ranks=(name,))


def version_differences(
    reports: Sequence[RankReport], coordinator: RankReport
) -> Iterator[Problem]:
    for package, ours in coordinator.versions.items():
        others: dict[str, list[str]] = defaultdict(list)
        for report in reports:
            theirs = report.versions.get(package, "missing")
            if theirs != ours:
                others[theirs].append(report.name)
        for theirs, names in others.items():
            text = f"{package} is {theirs} on {_listed(names)}, but {ours} on {coordinator.name}."
            yield Problem(kind="version", text=text, ranks=tuple(names))


def file_differences(reports: Sequence[RankReport], coordinator: RankReport) -> Iterator[Problem]:
    """Compares each rank's files with the coordinator's; ranks with the same difference share a
    problem."""
    ours = {mark.name: mark for mark in coordinator.files}
    theirs = {report.name: {mark.name: mark for mark in report.files} for report in reports}
    names = dict.fromkeys([*ours, *(name for marks in theirs.values() for name in marks)])
    for name in names:
        others: dict[str, list[str]] = defaultdict(list)
        for rank, marks in theirs.items():
            if marks.get(name) != ours.get(name):
                others[_described(marks.get(name))].append(rank)
        for description, ranks in others.items():
            text = (
                f"the checkpoint's file {name} {description} on {_listed(ranks)}, but "
                f"{_described(ours.get(name))} on {coordinator.name}."
            )
            yield Problem(kind="file", text=text, ranks=tuple(ranks))


def _described(mark: FileMark | None) -> str:
    if mark is None:
        return "is missing"
    return f"has {mark.size} bytes with hash {mark.digest[:_SHOWN_DIGITS]}"


def closed_ports(reports: Sequence[RankReport]) -> Iterator[Problem]:
    """Yields a problem for each port that ranks cannot reach for the same reason."""
    failures: dict[tuple[str, str, int, str], list[RankReport]] = defaultdict(list)
    tried: Counter[str] = Counter()
    for report in reports:
        for result in report.probes:
            tried[result.target.name] += 1
            if result.failure is not None:
                target = result.target
                key = (target.name, target.host, target.port, result.failure)
                failures[key].append(report)
    for (name, host, port, failure), blocked in failures.items():
        who = _listed([f"{report.name} ({report.host})" for report in blocked])
        if len(blocked) == tried[name] > 1:
            who = f"none of {who}"
            text = f"{who} can reach {name} on {host} port {port}: {failure}."
        else:
            text = f"{who} cannot reach {name} on {host} port {port}: {failure}."
        ranks = tuple(report.name for report in blocked)
        yield Problem(kind="port", text=text, ranks=ranks)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


PROBE_TIMEOUT_S = 5.0
JOIN_S = 120.0


class PreflightRound:
    """The checks of one start. `folder` is the checkpoint as the coordinator on `host` sees it.
    `limit_s` is the time for processes to start and import torch, even from a slow file system.
    """

    def __init__(
        self, expected: Sequence[ExpectedRank], folder: Path, host: str, limit_s: float = JOIN_S
    ) -> None:
        self._expected, self._folder, self.limit_s = expected, folder, limit_s
        self._reference = RankReport(
            name="the coordinator",
            host=host,
            versions=versions(),
            files=tuple(file_marks(folder)),
        )
        self._hellos: dict[str, Hello] = {}
        self._examined: dict[str, Examined] = {}

    def came(self, hello: Hello) -> None:
        """Adds a rank. A restarted rank replaces its predecessor."""
        self._hellos[hello.name] = hello
        self._examined.pop(hello.name, None)

    def examined(self, name: str, examined: Examined) -> None:
        self._examined[name] = examined

    @property
    def has_all_come(self) -> bool:
        return all(rank.name in self._hellos for rank in self._expected)

    @property
    def is_done(self) -> bool:
        return all(rank.name in self._examined for rank in self._expected)

    @property
    def order(self) -> Examine:
        """Returns the order, which is the same for all ranks. Each rank also tries its own port,
        which is harmless.
        """
        targets = [
            ProbeTarget(hello.name, hello.host, hello.probe_port)
            for hello in self._hellos.values()
            if hello.probe_port
        ]
        return Examine(folder=str(self._folder), targets=targets, timeout_s=PROBE_TIMEOUT_S)

    def problems(self, waited_s: float) -> list[Problem]:
        """Returns the problems known so far, including ranks that did not connect or answer."""
        reports, unread = [], []
        for name, hello in self._hellos.items():
            answer = self._examined.get(name)
            is_read = answer is not None and answer.why is None
            reports.append(
                RankReport(
                    name=name,
                    host=hello.host,
                    versions=dict(hello.versions),
                    files=tuple(answer.files) if answer and is_read else self._reference.files,
                    probes=tuple(answer.probes) if answer else (),
                )
            )
            if self.has_all_come and not is_read:
                why = answer.why if answer else f"it did not answer within {waited_s:g} s"
                text = f"{name} cannot be examined: {why}"
                unread.append(Problem(kind="file", text=text, ranks=(name,)))
        return find_problems(self._expected, reports, self._reference, waited_s) + unread


def check_transport(wanted: TransportName, gpus: Mapping[str, str]) -> None:
    """Raises ConfigError if `wanted` is nccl and a rank has no GPU of its own.

    `gpus` maps each loaded rank to its GPU, empty for none. `auto` and `host` always work.
    """
    if wanted != "nccl":
        return
    without = [name for name, gpu in gpus.items() if not gpu]
    if without:
        raise ConfigError(
            f"cluster.transport is 'nccl', and {', '.join(without)} has no CUDA GPU that NCCL "
            "reaches: use 'auto' or 'host'."
        )
    owners: dict[str, str] = {}
    for name, gpu in gpus.items():
        if gpu in owners:
            raise ConfigError(
                f"cluster.transport is 'nccl', and {owners[gpu]} and {name} share a GPU, which "
                "NCCL refuses: use 'auto' or 'host'."
            )
        owners[gpu] = name
