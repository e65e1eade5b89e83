"""Orders waiting requests by their deadlines: the keys of `fifo`, `priority`, `edf` and `atc`.

Keys are seconds, and the smallest goes first. On top of every rule:

    preempted, oldest first  <  waited for max_wait_s, oldest first  <  the rule  <  demoted

A request of a tenant that has had more than its share goes by age after twice `max_wait_s`, and so
does one whose answer became a runaway: both go behind the others of their tier.
docs/internals/deadlines.md has the theory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_serve.config.sections import LateName, OrderName, SchedulerConfig
from moe_serve.engine.service.waiting_table import WaitingTable
from moe_serve.errors import ConfigError

Floats = NDArray[np.float64]
BY_DEADLINE: tuple[OrderName, ...] = ("edf", "atc")
MOST_BUCKET_S = 0.25  # keys that differ by at most a bucket are equally urgent
_BUCKETS = 16  # of a bucket, at least in the strictest target of the tiers
_MOST_RATIO = 2.0  # of the longest and the shortest reading time that atc tells apart
_LEAST_WORK_S = 1e-6
_HARD_BOUND = 2.0  # times max_wait_s: any request goes by age then, whatever its tenant's share
_PREEMPTED, _AGED, _DEMOTED = -2e9, -1e9, 1e9  # offsets of the classes, beyond every key


def check_order(config: SchedulerConfig) -> None:
    """Raises ConfigError if a key is set that has no effect in the configured order."""
    order = resolved_order(config)
    if order in BY_DEADLINE:
        return
    for tier in config.tiers:
        if tier.predicted_output_limit is not None and tier.runaways == "demote":
            raise ConfigError(
                f"scheduler.tiers.{tier.name} demotes answers over its predicted_output_limit, "
                f"which needs an order by deadlines, but the order is {order!r}: set "
                "scheduler.order to 'atc' or 'edf', or runaways of the tier to end."
            )
    for key, value, default in (
        ("preempt", config.preempt, "memory"),
        ("late", config.late, "keep"),
    ):
        if value != default:
            raise ConfigError(
                f"scheduler.{key} is {value!r}, which needs an order by deadlines, but the order "
                f"is {order!r}: set scheduler.order to 'atc' or 'edf', or scheduler.{key} to "
                f"{default!r}."
            )


def log_of(seconds: float) -> float:
    """Returns the logarithm of a time of reading, with a small lower bound in place of 0."""
    return math.log(max(_LEAST_WORK_S, seconds))


def is_aged(keys: Floats) -> NDArray[np.bool_]:
    """Returns whether keys are those of requests that have their places by age alone."""
    return np.asarray(keys < _AGED / 2)


class Rule(Protocol):
    """Computes the key of a request from its age, the time until it must start (`slack`), the time
    to read its prompt (`work`), and the logarithms of that time and of its weight."""

    def __call__(
        self,
        age: Floats,
        slack: Floats,
        work: Floats,
        log_work: Floats,
        log_weight: Floats,
        priority: Floats,
        /,
    ) -> Floats: ...


def resolved_order(config: SchedulerConfig) -> OrderName:
    """Returns the name of the order that `scheduler.order` stands for."""
    if config.order != "auto":
        return config.order
    return "atc" if config.tiers else "priority"


def rule_of(config: SchedulerConfig, usual_work_s: Callable[[], float]) -> Rule:
    """Returns the configured rule. `usual_work_s`: the usual time to read a prompt."""
    name, step_s = resolved_order(config), config.max_passed_over_s
    most = math.log(_MOST_RATIO) / 2

    def atc(
        age: Floats, slack: Floats, work: Floats, log_work: Floats, weight: Floats, priority: Floats
    ) -> Floats:
        # In place, as each further array of 10 000 rows costs more than the arithmetic.
        usual = log_of(usual_work_s())
        index = np.maximum(log_work, usual - most)
        np.minimum(index, usual + most, out=index)
        index -= weight
        index -= usual
        index *= config.patience_s
        index += np.maximum(0.0, slack)
        return index

    def edf(
        age: Floats, slack: Floats, work: Floats, log_work: Floats, weight: Floats, priority: Floats
    ) -> Floats:
        return slack + work

    def fifo(
        age: Floats, slack: Floats, work: Floats, log_work: Floats, weight: Floats, priority: Floats
    ) -> Floats:
        return -age

    def by_priority(
        age: Floats, slack: Floats, work: Floats, log_work: Floats, weight: Floats, priority: Floats
    ) -> Floats:
        return step_s * priority - age

    rules: dict[str, Rule] = {"atc": atc, "edf": edf, "fifo": fifo, "priority": by_priority}
    return rules[name]


class StartOrder:
    """A rule with the age bound, and with demotion if it is configured."""

    def __init__(
        self, rule: Rule, max_wait_s: float, late: LateName, bucket_s: float = MOST_BUCKET_S
    ) -> None:
        """`bucket_s`: keys that differ by at most this are equally urgent."""
        self._rule, self._max_wait_s, self._demotes = rule, max_wait_s, late == "demote"
        self.bucket_s = bucket_s

    def keys(
        self, table: WaitingTable, now_s: float, token_s: float, is_ahead: NDArray[np.bool_] | None
    ) -> Floats:
        """Returns the keys of all rows. `token_s`: seconds to read a token; `is_ahead`: rows whose
        tenants have had more than their share (None: none)."""
        age, work, slack = now_s - table.queued, table.num_left * token_s, table.deadline - now_s
        slack -= work
        keys = self._rule(
            age, slack, work, table.log_left + log_of(token_s), table.log_weight, table.priority
        )
        if self._demotes:
            is_late = (slack < 0.0) & ~table.is_preempted
            table.is_late |= is_late
            keys = np.where(is_late, keys + _DEMOTED, keys)
        is_preempted = table.is_preempted
        if table.num_demoted:
            is_preempted = is_preempted & ~table.is_demoted
            is_ahead = table.is_demoted if is_ahead is None else is_ahead | table.is_demoted
        if is_ahead is not None and is_ahead.any():
            keys = behind_the_others(keys, is_ahead, table.tier, self.bucket_s)
        if age.max(initial=0.0) >= self._max_wait_s:
            is_aged = age >= self._max_wait_s
            if is_ahead is not None:
                is_aged &= ~is_ahead | (age >= _HARD_BOUND * self._max_wait_s)
            keys = np.where(is_aged, _AGED + table.queued, keys)
        if table.num_preempted:
            keys = np.where(is_preempted, _PREEMPTED + table.queued, keys)
        return np.asarray(keys)

    def floors(self, table: WaitingTable, keys: Floats, token_s: float) -> Floats:
        """Returns the least that each row's key becomes while it waits, unless by age."""
        age = np.full(len(table), math.inf)
        work = table.num_left * token_s
        logs = table.log_left + log_of(token_s)
        least = self._rule(age, -age, work, logs, table.log_weight, table.priority)
        return np.minimum(keys, least)

    def keys_of(
        self, age: Floats, slack: Floats, work: Floats, log_weight: Floats, priority: Floats
    ) -> Floats:
        """Returns the keys of requests that were not preempted, by the arguments of `Rule`."""
        logs = np.log(np.maximum(work, _LEAST_WORK_S))
        keys = self._rule(age, slack, work, logs, log_weight, priority)
        if self._demotes:
            keys = np.where(slack < 0.0, keys + _DEMOTED, keys)
        return np.where(age >= self._max_wait_s, _AGED - age, keys)

    def keys_over_time(
        self, slack_s: float, work_s: float, weight: float, priority: int
    ) -> Callable[[Floats], Floats]:
        """Returns a function from seconds of waiting to the keys that a newcomer then has.
        `slack_s` is from its arrival to the latest start that keeps its deadline."""

        def keys_at(ages: Floats) -> Floats:
            ones = np.ones_like(ages)
            logs = math.log(weight) * ones
            return self.keys_of(ages, slack_s - ages, work_s * ones, logs, priority * ones)

        return keys_at


def all_in_time(queued: Floats, work: Floats, seat: Floats, slack: Floats, seat_s: float) -> bool:
    """Returns True if all requests keep their deadlines when they are read in order of arrival. The
    arrays have for each request the seconds to read it, 1 if it needs a seat, and the time until it
    must be read. `seat_s`: the seconds until the n-th needed seat is free, over n."""
    order = np.argsort(queued, kind="stable")
    read_s = np.cumsum(work[order])
    own_s, seats_s = work[order], np.cumsum(seat[order]) * seat_s
    return bool(np.all(np.maximum(read_s, seats_s + own_s) <= slack[order]))


def bucket_of(config: SchedulerConfig) -> float:
    """Returns the width of a bucket: a small part of the strictest target for the first token."""
    targets = [tier.ttft_s for tier in config.tiers if tier.ttft_s is not None]
    return min([MOST_BUCKET_S, *[target / _BUCKETS for target in targets]])


def behind_the_others(
    keys: Floats, is_ahead: NDArray[np.bool_], tier: NDArray[np.int64], bucket_s: float
) -> Floats:
    """Puts the rows of tenants that are ahead behind the last other row of their tier."""
    keys, rows = keys.copy(), np.flatnonzero(is_ahead)
    others, tiers = np.where(is_ahead, -math.inf, keys), tier[rows]
    for index in np.flatnonzero(np.bincount(tiers)):
        last = np.where(tier == index, others, -math.inf).max()
        moved = rows[tiers == index]
        keys[moved] = np.maximum(keys[moved], last + 2 * bucket_s)
    return keys
