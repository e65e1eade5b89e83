"""Serves one engine's requests by their targets: order, reading, expiry and the forecast.

The scheduler asks; nothing here changes a sequence's pages or tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items

import numpy as np

from moe_serve.engine.request.sequence import Schedule, Sequence
from moe_serve.engine.request.standing import Standing
from moe_serve.engine.service.forecast import QueueSnapshot
from moe_serve.engine.service.near_steps import Remaining
from moe_serve.engine.service.order import Floats, all_in_time
from moe_serve.engine.service.ranked_waiting import RankedWaiting
from moe_serve.engine.service.service_state import ServiceState
from moe_serve.engine.service.step_budget import StepBudget, least_tpot_s, rows_of_decoding
from moe_serve.engine.service.waiting_table import WaitingTable

_NUM_ENDS = 129  # ends of requests from which the time between two free seats is known
_LEAST_NUM_ENDS = 4
NOTHING: Schedule = {}
_MOST_CALM = 256  # longest queue that may be served in order of arrival
_LEAST_PAUSE_S = 0.05  # between two snapshots of a queue in which nothing comes or goes


def standing_of(sequence: Sequence) -> Standing:
    """Returns the standing of a sequence that was queued in a server with tiers."""
    assert sequence.standing is not None, f"sequence {sequence.id} was not given a standing"
    return sequence.standing


class ServiceQueue:
    """The queue of one engine, whose number is `engine`."""

    def __init__(self, state: ServiceState, engine: int, page_size: int) -> None:
        self.state, self._engine = state, engine
        self.table = WaitingTable()
        self._ranked: RankedWaiting | None = None  # the order in the present step
        self.is_calm = False  # requests are served in order of arrival
        self._danger_s = -math.inf  # when that order last missed a target, steady clock
        self._ends: deque[float] = deque(maxlen=_NUM_ENDS)  # of running requests, steady clock
        self._published, self._published_s = (-1, -1), 0.0
        self._last_end_at: float | None = None  # of a step, engine's clock
        self.prompt_limit: int | None = None  # of the next step, set by a coordinator
        config = state.config
        self.is_ordered = state.order_name in ("edf", "atc")
        has_tpot = any(tier.tpot_s is not None for tier in config.tiers)
        is_slack = config.step_budget == "slack" or (config.step_budget == "auto" and has_tpot)
        self.budget = (
            StepBudget(state.model, config.min_prefill_tokens, page_size) if is_slack else None
        )

    def joined(self, sequence: Sequence) -> None:
        """Adds a sequence that waits."""
        self.table.add(sequence)
        self.state.shares.wait(standing_of(sequence).tenant)

    def left(self, sequence: Sequence) -> None:
        """Removes a sequence that started or ended."""
        self.table.remove(sequence)
        self.state.shares.stop_waiting(standing_of(sequence).tenant)

    def freed_seat(self) -> None:
        """Notes that a running sequence ended."""
        self._ends.append(self.state.steady())

    def begin_step(self, running: Items[Sequence] = ()) -> None:
        """Chooses the order of a step anew. `running`: the engine's sequences. The order of arrival
        is used once it has met all deadlines for `patience_s`: other orders make some wait."""
        if self.state.steady.is_resting:
            self.state.steady.turn()
        self._ranked = None
        if self.state.order_name == "atc":
            now_s = self.state.steady()
            if not self._are_in_time(running, now_s):
                self._danger_s = now_s
            self.is_calm = now_s >= self._danger_s + self.state.config.patience_s

    def _are_in_time(self, running: Items[Sequence], now_s: float) -> bool:
        """Returns True if all prompts keep their deadlines in order of arrival. Returns False for a
        long queue, one with tenants above their share, and one in which some will go by age."""
        state, table, config, num = self.state, self.table, self.state.config, len(self.table)
        if num > _MOST_CALM or not state.model.is_measured or table.num_preempted:
            return False
        reading = [s for s in running if s.num_pending_tokens > 1]
        if num + len(reading) < 2:
            return True
        if num and state.shares.are_ahead(state.delta_s) is not None:
            return False
        found = [(standing_of(s), s.num_pending_tokens) for s in reading]
        rows = [(each.queued_s, each.deadline_s, num_left) for each, num_left in found]
        queued, deadline, left = np.array(rows, dtype=np.float64).reshape(len(rows), 3).T
        queued, deadline = np.append(table.queued, queued), np.append(table.deadline, deadline)
        has_seats = num <= config.max_num_seqs - len(running)
        return all_in_time(
            queued,
            np.append(table.num_left, left) * state.token_s,
            np.append(np.ones(num), np.zeros(len(rows))),
            np.minimum(deadline, queued + config.max_wait_s) - now_s - state.usual_step_s,
            0.0 if has_seats else self._known_seat_s(),
        )

    def _start_keys(self) -> Floats:
        """Returns the keys by which waiting sequences start in this step."""
        if self.is_calm:
            return np.asarray(self.table.queued - self.state.steady())
        return self.keys()

    def keys(self) -> Floats:
        """Returns the keys of all waiting sequences by their rows."""
        state = self.state
        ahead = state.shares.are_ahead(state.delta_s)
        is_ahead = None if ahead is None else ahead[self.table.tenant]
        return state.order.keys(self.table, state.steady(), state.token_s, is_ahead)

    def groups(self, until: float = math.inf) -> Iterator[Items[Sequence]]:
        """Yields groups of equally urgent waiting sequences, the most urgent first and in each the
        one that is read fastest; only those with keys below `until`."""
        return self._rank().groups(until)

    def num_before(self, sequence: Sequence) -> int:
        """Counts the waiting sequences ahead of a running one of another cell. A late one is due
        now.
        """
        standing, request = standing_of(sequence), sequence.request
        now_s, work_s = standing.clock(), sequence.num_pending_tokens * self.state.token_s
        (key,) = self.state.order.keys_of(
            np.array([now_s - standing.queued_s]),
            np.array([max(0.0, standing.deadline_s - now_s - work_s)]),
            np.array([work_s]),
            np.array([math.log(request.service.weight)]),
            np.array([request.priority]),
        )
        return int(np.count_nonzero(self.keys() < key))

    def first(self) -> tuple[float, Sequence] | None:
        """Returns the most urgent waiting sequence and its key."""
        return self._rank().first

    def fresh(self, most: int) -> list[Sequence]:
        """Returns up to `most` waiting sequences that never ran, the most urgent first."""
        sequences = self.table.sequences
        order = [sequences[row] for row in np.argsort(self.keys(), kind="stable")]
        return [sequence for sequence in order if sequence.started_at is None][:most]

    def put_first(self, sequence: Sequence) -> None:
        """Lets a waiting sequence start before all others in the present step."""
        self._rank().put_first(sequence)

    def _rank(self) -> RankedWaiting:
        if self._ranked is None:
            began = self.state.clock()
            self._ranked = RankedWaiting(self.table, self._start_keys, self.state.order.bucket_s)
            self.state.decisions.count(self.state.clock() - began)
            self._count_late()
        return self._ranked

    def _count_late(self) -> None:
        if self.state.config.late != "demote":
            return
        for row in np.flatnonzero(self.table.is_late):
            standing = standing_of(self.table.sequences[row])
            if not standing.is_relegated:
                standing.is_relegated = True
                self.state.ledger.add(standing.tier, "num_relegated")

    def reading_keys(self, reading: Items[Sequence]) -> list[float]:
        """Returns the keys of sequences being read. Those that are computed again go first."""
        if not reading:
            return []
        state, now_s = self.state, self.state.steady()
        rows = [
            (
                now_s - (standing := standing_of(s)).queued_s,
                standing.deadline_s - now_s,
                s.num_pending_tokens,
                math.log(s.request.service.weight),
                s.request.priority,
                len(s.token_ids) > s.num_prompt_tokens and not standing.is_demoted,
            )
            for s in reading
        ]
        age, left_s, num_left, log_weight, priority, is_again = np.array(rows, dtype=np.float64).T
        work = num_left * state.token_s
        keys = state.order.keys_of(age, left_s - work, work, log_weight, priority)
        return list(np.where(is_again > 0.0, -math.inf, keys).tolist())

    def reading_order(self, reading: list[Sequence]) -> tuple[list[Sequence], list[float]]:
        """Returns prompts that are being read, the most urgent first, and their keys; in a bucket,
        the one with the fewest tokens left comes first."""

        def place(item: tuple[float, Sequence]) -> tuple[float, float]:
            key, sequence = item
            if self.is_calm:
                return standing_of(sequence).queued_s, 0.0
            if key == -math.inf:
                return -math.inf, standing_of(sequence).queued_s
            return key // self.state.order.bucket_s, float(sequence.num_pending_tokens)

        items = sorted(zip(self.reading_keys(reading), reading, strict=True), key=place)
        return [sequence for _, sequence in items], [key for key, _ in items]

    def num_prompt_tokens(self, decoding: Items[Sequence], most: int) -> int:
        """Returns how many prompt tokens the next step may read beside those that decode."""
        if self.prompt_limit is not None:
            return min(most, self.prompt_limit)
        if self.budget is None:
            return most
        return self.budget.prompt_tokens(rows_of_decoding(decoding), self.slack_s(decoding), most)

    def slack_s(self, decoding: Iterable[Sequence]) -> float | None:
        """Returns the seconds that the next step may take; None: no sequence that decodes has a
        target for the time between tokens."""
        if (least_s := least_tpot_s(decoding)) is None:
            return None
        now = self.state.clock()
        return least_s - (0.0 if self._last_end_at is None else now - self._last_end_at)

    def expired(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Returns the strict sequences whose deadlines have passed."""
        if not self.state.policy.num_strict:
            return []
        now_s = self.state.steady()
        rows = np.flatnonzero(self.table.due <= now_s)
        late = [self.table.sequences[row] for row in rows]
        return late + [s for s in running if standing_of(s).due_s <= now_s]

    def charge(self, places: list[int], counts: list[int]) -> None:
        """Charges tenants, by their places, for a step of `counts` tokens of requests."""
        row_s, token_s = self.state.work.decode_row, self.state.work.prompt_token
        seconds = [row_s if count == 1 else token_s * count for count in counts]
        self.state.shares.charge_all(places, seconds)

    @property
    def seat_s(self) -> float:
        """Seconds between two seats that become free, as seen lately; infinite: unknown."""
        if len(self._ends) < _LEAST_NUM_ENDS:
            return math.inf
        return (self.state.steady() - self._ends[0]) / len(self._ends)

    def _known_seat_s(self) -> float:
        return self.state.step_s if math.isinf(seat_s := self.seat_s) else seat_s

    def snapshot(self, running: Items[Sequence], schedule: Schedule = NOTHING) -> QueueSnapshot:
        """Returns the queue that a newcomer will find at the end of the step that computes
        `schedule`.
        """
        state, policy, keys = self.state, self.state.policy, self.keys()
        reading, left, rows = list[Sequence](), list[int](), list[tuple[float, float]]()
        for sequence in running:
            count = schedule[sequence.id][1] if sequence.id in schedule else 0
            num_left = sequence.num_pending_tokens - count
            if num_left > 1:
                reading.append(sequence)
                left.append(num_left)
            else:
                num_output = sequence.num_output_tokens + (num_left == 0)
                rows.append((num_output, policy.ends.most_tokens(sequence)))
        decoding = np.array(rows, dtype=np.float64).reshape(len(rows), 2)
        return QueueSnapshot(
            # Requests that come while a step runs are queued in the turn after it.
            turn=policy.num_turns + bool(schedule),
            cell=state.number,
            token_s=state.token_s,
            step_s=state.step_s,
            more_s=state.more_s,
            usual_step_s=state.usual_step_s,
            budget=float(max(1, state.config.max_batched_tokens - len(rows))),
            bucket_s=state.order.bucket_s if self.is_ordered else 0.0,
            is_calm=self.is_calm,
            remaining=Remaining(decoding[:, 0], decoding[:, 1], state.policy.ends.survival),
            num_free_seats=state.config.max_num_seqs - len(running),
            seat_s=self._known_seat_s(),
            reading_keys=np.array(self.reading_keys(reading)),
            reading_left=np.array(left, dtype=np.float64),
            keys=keys,
            floors=state.order.floors(self.table, keys, state.token_s),
            num_left=self.table.num_left.copy(),
            uncached=policy.uncached,
            arrivals=policy.arrivals.rates,
            share=1 / max(1, state.admission.num_snapshots),
            behind=self._behind(keys),
        )

    def _behind(self, keys: Floats) -> dict[tuple[str, str], float]:
        """Returns the keys of newcomers of tenants that have had more than their share."""
        state, table = self.state, self.table
        ahead = state.shares.are_ahead(state.delta_s)
        if ahead is None:
            return {}
        others = ~ahead[table.tenant]
        found: dict[tuple[str, str], float] = {}
        key_of: dict[int, float] = {}  # by tier
        for tier, tenant in state.shares.names(np.flatnonzero(ahead)):
            if tier not in key_of:
                last = keys.max(where=others & (table.tier == tier), initial=-math.inf)
                key_of[tier] = float(last) + 2 * state.order.bucket_s
            found[state.policy.tier_names[tier], tenant] = key_of[tier]
        return found

    def step_begun(
        self, running: Items[Sequence], schedule: Schedule, seconds: float, *, is_ahead: bool
    ) -> None:
        """Publishes the queue that a newcomer will find at the end of a step that takes `seconds`.
        With `is_ahead` the step begins when the running one ends.
        """
        if not self.state.model.is_measured:
            return
        admission = self.state.admission
        admission.step_begun(self._engine, self.state.clock(), seconds, is_ahead=is_ahead)
        now_s, contents = self.state.steady(), (self.table.version, len(running))
        if contents != self._published or now_s >= self._published_s + _LEAST_PAUSE_S:
            self._published, self._published_s = contents, now_s
            admission.publish(self._engine, self.snapshot(running, schedule))

    def step_ended(self, running: Items[Sequence], *, has_work: bool) -> None:
        """Notes the end of a step. After the last one it publishes an empty queue."""
        self._last_end_at = self.state.clock() if running else None
        if not has_work:
            self._ends.clear()
            if self.state.model.is_measured:
                self._published = (-1, -1)
                self.state.admission.publish(self._engine, self.snapshot(running))

    def set_open(self, *, is_open: bool) -> None:
        """Sets whether the engine takes new requests. Forecasts only count engines that do."""
        self.state.admission.set_engine_open(self._engine, is_open=is_open)

    def withdraw(self) -> None:
        """Forgets the engine because it is lost."""
        self.state.admission.withdraw(self._engine)

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """Asserts that the table holds the waiting sequences."""
        self.table.check_integrity(waiting)
        self.state.shares.check_integrity()
