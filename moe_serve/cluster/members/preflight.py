"""Before anything is loaded: who never came, and who does not fit the others.

Pure functions over what the ranks reported. One problem is one sentence; ranks that share one are
named together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moe_serve.cluster.control.messages import FileMark
from moe_serve.cluster.control.probe import ProbeResult

Kind = Literal["absent", "unexpected", "version", "file", "port"]
_SHOWN_DIGITS = 12  # of a hash


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRank:
    """A rank that should come, and the node (as the user named it) that should start it."""

    name: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank has and sees. The coordinator's own is what the others are compared with."""

    name: str
    host: str
    versions: dict[str, str]  # package, or protocol -> version
    files: tuple[FileMark, ...] = ()
    probes: tuple[ProbeResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`text` is one sentence for the user; `ranks` are those it is about."""

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
    """Everything that keeps the ranks from working together; empty: they can begin."""
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
    """By node: all the ranks of one that did not start at all make one sentence."""
    came = {report.name for report in reports}
    by_node: dict[str, list[str]] = defaultdict(list)
    for rank in expected:
        by_node[rank.node].append(rank.name)
    for node, names in by_node.items():
        absent = tuple(name for name in names if name not in came)
        if not absent:
            continue
        if len(absent) == len(names):
            text = f"no rank of {node} came within {waited_s:g} s: {_listed(absent)}."
        else:
            some = f"{len(names) - len(absent)} of the {len(names)} ranks of {node} came"
            text = f"{some} within {waited_s:g} s; missing: {_listed(absent)}."
        yield Problem(kind="absent", text=text, ranks=absent)


def unexpected_ranks(
    expected: Sequence[ExpectedRank], reports: Sequence[RankReport]
) -> Iterator[Problem]:
    """Ranks of another layout, and ranks that were started twice."""
    known = {rank.name for rank in expected}
    for name, count in Counter(report.name for report in reports).items():
        hosts = _listed(sorted({report.host for report in reports if report.name == name}))
        if name not in known:
            text = f"{name} came from {hosts} and is no part of this layout."
        elif count > 1:
            text = f"{name} came {count} times, from {hosts}: each rank is started once."
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
            text = f"{package} is {theirs} on {_listed(names)} and {ours} on {coordinator.name}."
            yield Problem(kind="version", text=text, ranks=tuple(names))


def file_differences(reports: Sequence[RankReport], coordinator: RankReport) -> Iterator[Problem]:
    """Ranks are compared with the coordinator, file by file; those that agree are told once."""
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
                f"the checkpoint's file {name} {description} on {_listed(ranks)} and "
                f"{_described(ours.get(name))} on {coordinator.name}."
            )
            yield Problem(kind="file", text=text, ranks=tuple(ranks))


def _described(mark: FileMark | None) -> str:
    if mark is None:
        return "is missing"
    return f"has {mark.size} bytes with hash {mark.digest[:_SHOWN_DIGITS]}"


def closed_ports(reports: Sequence[RankReport]) -> Iterator[Problem]:
    """By target: a port that several ranks cannot reach for one reason makes one sentence."""
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
