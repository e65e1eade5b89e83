"""Divides the deadline of a workflow among its stages in proportion to past runs.

A client names a task of several requests `kind/run`, for example `report/8f2c`, and each request
its `stage`. The deadline of the whole counts from the first request of the run. A stage is due at
the mean share of the time that past runs of the kind needed up to its end:

    deadline 60 s, past runs   plan 0.2   search 0.7   write 1.0   ->   due after 12 s, 42 s, 60 s

Until 20 runs are known the stages share the time evenly, in the order in which they first appeared.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

_NUM_RUNS_NEEDED = 20
_MAX_RUNS = 1024  # open ones; the least recently used is closed
_MAX_KINDS = 256
_MAX_STAGES = 64  # of a kind; further ones are due at the end
_IDLE_S = 600.0  # a run without a request for this long has ended
_WEIGHT = 0.05  # of a new run, once 20 are known


@dataclass(slots=True)
class _Kind:
    """The past runs of workflows of one name."""

    shares: dict[str, float] = field(default_factory=dict)  # stage -> mean share up to its end
    num_seen: dict[str, int] = field(default_factory=dict)  # stage -> runs that had it
    num_runs: int = 0


@dataclass(slots=True)
class _WorkflowRun:
    """A run that may continue. `ends_s`: when each stage last ended."""

    started_s: float
    used_s: float
    ends_s: dict[str, float] = field(default_factory=dict)


class Workflows:
    """The state of all tenants' workflows. It is bounded, even if no run ever ends."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str, str], _Kind] = OrderedDict()
        self._runs: OrderedDict[tuple[str, str], _WorkflowRun] = OrderedDict()

    @property
    def num_open(self) -> int:
        return len(self._runs)

    def due_s(
        self, tenant: str, workflow: str, stage: str, whole_s: float, queued_s: float
    ) -> float:
        """Notes a request of a stage. Returns the moment at which its answer should be complete."""
        self._close_idle(queued_s)
        run = self._runs.get((tenant, workflow))
        if run is None:
            run = self._runs[tenant, workflow] = _WorkflowRun(queued_s, queued_s)
            if len(self._runs) > _MAX_RUNS:
                self._close(next(iter(self._runs)))
        run.used_s = queued_s
        self._runs.move_to_end((tenant, workflow))
        kind = self._kind(tenant, workflow)
        if stage not in kind.shares and len(kind.shares) < _MAX_STAGES:
            kind.shares[stage], kind.num_seen[stage] = 1.0, 0
        return run.started_s + whole_s * self._share(kind, stage)

    def ended(self, tenant: str, workflow: str, stage: str, now_s: float) -> None:
        """Notes that the answer of a stage is complete."""
        run = self._runs.get((tenant, workflow))
        if run is not None and (stage in run.ends_s or len(run.ends_s) < _MAX_STAGES):
            run.ends_s[stage] = run.used_s = now_s

    def _share(self, kind: _Kind, stage: str) -> float:
        if stage not in kind.shares:
            return 1.0
        if kind.num_runs < _NUM_RUNS_NEEDED or not kind.num_seen[stage]:
            names = list(kind.shares)
            return (names.index(stage) + 1) / len(names)
        return kind.shares[stage]

    def _kind(self, tenant: str, workflow: str) -> _Kind:
        key = (tenant, workflow.partition("/")[0])
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind()
            if len(self._kinds) > _MAX_KINDS:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(key)
        return kind

    def _close_idle(self, now_s: float) -> None:
        while self._runs:
            key, run = next(iter(self._runs.items()))
            if now_s - run.used_s < _IDLE_S:
                return
            self._close(key)

    def _close(self, key: tuple[str, str]) -> None:
        """Learns the shares of a run that has ended."""
        run = self._runs.pop(key)
        total_s = max(run.ends_s.values(), default=run.started_s) - run.started_s
        if total_s <= 0.0:
            return
        kind = self._kind(*key)
        kind.num_runs += 1
        for stage, end_s in run.ends_s.items():
            if stage not in kind.shares:
                continue
            kind.num_seen[stage] += 1
            weight = max(_WEIGHT, 1 / kind.num_seen[stage])
            share = (end_s - run.started_s) / total_s
            kind.shares[stage] += weight * (share - kind.shares[stage])
