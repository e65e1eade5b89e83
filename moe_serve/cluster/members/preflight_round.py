"""One pre-flight: collects what the ranks say, and tells when everybody has.

    came(rank) ...  -> everybody is there: `order` goes to all -> examined(rank) ... -> problems

Knows no sockets and no clock: who waits, and for how long, is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_serve.cluster.control.messages import Examine, Examined, Hello
from moe_serve.cluster.control.probe import ProbeTarget
from moe_serve.cluster.members.examine import versions
from moe_serve.cluster.members.file_marks import file_marks
from moe_serve.cluster.members.preflight import ExpectedRank, Problem, RankReport, find_problems

PROBE_TIMEOUT_S = 5.0


class PreflightRound:
    """`folder` is the checkpoint as the coordinator, on `host`, sees it."""

    def __init__(self, expected: Sequence[ExpectedRank], folder: Path, host: str) -> None:
        self._expected, self._folder = expected, folder
        self._reference = RankReport(
            name="the coordinator",
            host=host,
            versions=versions(),
            files=tuple(file_marks(folder)),
        )
        self._hellos: dict[str, Hello] = {}
        self._examined: dict[str, Examined] = {}

    def came(self, hello: Hello) -> None:
        """A rank that comes again, restarted, replaces the one before."""
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
        """The same for all; that each also tries its own port does no harm."""
        targets = [
            ProbeTarget(hello.name, hello.host, hello.probe_port)
            for hello in self._hellos.values()
            if hello.probe_port
        ]
        return Examine(folder=str(self._folder), targets=targets, timeout_s=PROBE_TIMEOUT_S)

    def problems(self, waited_s: float) -> list[Problem]:
        """Of what is known so far: ranks that did not come, or answer, are problems themselves."""
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
