"""Descends to a plan that no exchange between two devices improves.

`exchange.py` examines the most promising of all pairs; its table grows with the square of the
devices. For many devices a sweep is faster: a device that changed is *dirty*, is compared with
every slot of its row, and is clean when no exchange with any of them lowers the soft peak. Pairs of
clean devices need no examination, so the work grows with the number of changes.

Shapes as in `state.py`; n dirty devices, P = D x C slots, G dirty devices of a row at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from experts.placement.solvers.search.exchange import bundles_of, exchange, movable, swap_slots
from experts.placement.solvers.search.soft_peak import FORBIDDEN, LARGEST_OF_ONE, SoftPeak
from experts.placement.solvers.search.state import Bools, Floats, Ints, State

MANY = 64  # with more devices than this a sweep is faster and finds as much
AT_A_TIME = 4  # dirty devices of a row
_LEAST = 1e-12  # a smaller gain is rounding
Stop = Callable[[float], bool]  # receives the mean cost of all rows; True ends the descent
_MOST_STEPS = 20_000  # safety limit, far above what is needed
_MOST_CELLS = 120_000  # exchanges evaluated at a time: as many as fit a core's cache
_MOST_SWEPT = 300_000  # the same for sweeps, whose steps have more overhead


def sweep(state: State, soft: SoftPeak, dirty_ND: Bools, least: float) -> Bools:
    """Makes the best exchanges of each row's most promising dirty devices, if they lower the soft
    peak. Returns [N]: whether a dirty device promised more than `least`."""
    weighed_NDS = soft.weighed(state.loads_NDS)
    device_NG, promises_NG = _most_promising(weighed_NDS, dirty_ND, least, state)
    row_n, turn_n = np.nonzero(promises_NG)
    if len(row_n):
        device_n = device_NG[row_n, turn_n]
        dirty_ND[row_n, device_n] = False
        change_n, from_n, place_n = _best(state, soft, weighed_NDS, row_n, device_n)
        change_NG = np.zeros(device_NG.shape)
        from_NG, place_NG = np.zeros_like(device_NG), np.zeros_like(device_NG)
        change_NG[row_n, turn_n] = change_n
        from_NG[row_n, turn_n], place_NG[row_n, turn_n] = from_n, place_n
        _do(state, dirty_ND, change_NG, device_NG, from_NG, place_NG)
    return np.asarray(promises_NG.any(axis=1))


def _most_promising(
    weighed_NDS: Floats, dirty_ND: Bools, least: float, state: State
) -> tuple[Ints, Bools]:
    """Returns [N, G] devices, and which of them are dirty and promise more than `least`: in no
    scenario can two devices gain more than (sqrt E_a - sqrt E_b)^2 (see `exchange.py`)."""
    root_NDS = np.sqrt(weighed_NDS)
    above_NDS = root_NDS.max(axis=1, keepdims=True) - root_NDS
    below_NDS = root_NDS - root_NDS.min(axis=1, keepdims=True)
    promise_ND = np.square(np.maximum(above_NDS, below_NDS)).sum(axis=2)
    promise_ND[~dirty_ND] = 0.0
    count = 1 if state.rules.budget is not None else min(AT_A_TIME, promise_ND.shape[1])
    device_NG = np.argpartition(-promise_ND, count - 1, axis=1)[:, :count]
    promise_NG = np.take_along_axis(promise_ND, device_NG, axis=1)
    return device_NG, np.asarray(promise_NG > least)


def _best(
    state: State, soft: SoftPeak, weighed_NDS: Floats, row_n: Ints, device_n: Ints
) -> tuple[Floats, Ints, Ints]:
    """Returns for each device the change of the soft peak, its slot, and the slot [P] it trades
    with."""
    change_nCP = soft.against_all(state, weighed_NDS, row_n, device_n)
    change_n, from_n, place_n = _least(change_nCP)
    # Few trades are forbidden, so the masks are made only for the best one.
    wrong = np.arange(len(row_n))
    if state.rules.budget is None:
        may_n = _may(state, row_n, device_n, from_n, place_n)
        wrong = np.flatnonzero((change_n < -_LEAST) & ~may_n)
    if len(wrong):
        part_nCP = change_nCP[wrong]
        part_nCP += _forbidden(state, row_n[wrong], device_n[wrong])
        change_n[wrong], from_n[wrong], place_n[wrong] = _least(part_nCP)
    return change_n, from_n, place_n


def _least(change_nCP: Floats) -> tuple[Floats, Ints, Ints]:
    flat = change_nCP.reshape(len(change_nCP), -1)
    best_n = flat.argmin(axis=1)
    from_n, place_n = np.divmod(best_n, change_nCP.shape[2])
    return flat[np.arange(len(flat)), best_n], from_n, place_n


def _may(state: State, row_n: Ints, device_n: Ints, from_n: Ints, place_n: Ints) -> Bools:
    """[n]: both copies may go to the place of the other."""
    other_n, to_n = np.divmod(place_n, state.slot_NDC.shape[2])
    mine_n = state.slot_NDC[row_n, device_n, from_n]
    theirs_n = state.slot_NDC[row_n, other_n, to_n]
    may_n = state.free_NED[row_n, mine_n, other_n] & state.free_NED[row_n, theirs_n, device_n]
    movable_NDC = movable(state)
    if movable_NDC is not None:
        may_n &= movable_NDC[row_n, device_n, from_n] & movable_NDC[row_n, other_n, to_n]
    return np.asarray(may_n)


def _forbidden(state: State, row_n: Ints, device_n: Ints) -> Floats:
    """[n, C, P]: more than any gain if a copy may not leave, or not arrive."""
    num_rows, num_devices, num_slots = state.slot_NDC.shape
    slot_NP = state.slot_NDC.reshape(num_rows, -1)
    mine_nC = state.slot_NDC[row_n, device_n]
    there_nCD = state.free_NED[row_n[:, None], mine_nC]
    back_nP = state.free_NED[row_n[:, None], slot_NP[row_n], device_n[:, None]]
    movable_NDC = movable(state)
    if movable_NDC is not None:
        there_nCD &= movable_NDC[row_n, device_n][:, :, None]
        back_nP &= movable_NDC.reshape(num_rows, -1)[row_n]
    there_nCP = np.repeat(np.where(there_nCD, 0.0, FORBIDDEN), num_slots, axis=2)
    there_nCP += np.where(back_nP, 0.0, FORBIDDEN)[:, None]
    current_NED, budget = state.rules.current_NED, state.rules.budget
    if current_NED is not None and budget is not None:
        is_there = current_NED.view(np.int8)
        device_P = np.repeat(np.arange(num_devices), num_slots)
        here_nC = is_there[row_n[:, None], mine_nC, device_n[:, None]]
        cost_nCP = here_nC[:, :, None] - is_there[row_n[:, None], mine_nC][:, :, device_P]
        theirs_nP = is_there[row_n[:, None], slot_NP[row_n], device_P]
        mine_nP = is_there[row_n[:, None], slot_NP[row_n], device_n[:, None]]
        cost_nCP += (theirs_nP - mine_nP)[:, None]
        left_n = (budget - state.new_copies())[row_n]
        there_nCP[cost_nCP > left_n[:, None, None]] = FORBIDDEN
    return np.asarray(there_nCP)


def _do(
    state: State,
    dirty_ND: Bools,
    change_NG: Floats,
    device_NG: Ints,
    from_NG: Ints,
    place_NG: Ints,
) -> None:
    """Makes the best trade of a row first, then those that touch neither of its devices; other
    devices stay dirty."""
    num_slots = state.slot_NDC.shape[2]
    other_NG, to_NG = np.divmod(place_NG, num_slots)
    rows = np.arange(len(change_NG))
    change_NG = change_NG.copy()
    for _ in range(change_NG.shape[1]):
        best_N = change_NG.argmin(axis=1)
        live = np.flatnonzero(change_NG[rows, best_N] < -_LEAST)
        if not len(live):
            return
        best = best_N[live]
        a, b = device_NG[live, best], other_NG[live, best]
        swap_slots(state, live, (a, from_NG[live, best]), (b, to_NG[live, best]))
        dirty_ND[live, a] = dirty_ND[live, b] = True
        a_n1, b_n1 = a[:, None], b[:, None]
        device_nG, other_nG = device_NG[live], other_NG[live]
        meets_nG = (device_nG == a_n1) | (device_nG == b_n1)
        meets_nG |= (other_nG == a_n1) | (other_nG == b_n1)
        late_n, turn_n = np.nonzero(meets_nG & (change_NG[live] < -_LEAST))
        dirty_ND[live[late_n], device_nG[late_n, turn_n]] = True
        change_nG = change_NG[live]
        change_nG[meets_nG] = 0.0
        change_NG[live] = change_nG


@dataclass(frozen=True, slots=True, kw_only=True)
class DescentStage:
    """The resolution of a descent."""

    sharpness: float  # of the soft peak
    least: float  # smallest possible gain of a pair, in each scenario, for which it is examined
    sizes: tuple[int, ...] = (1, 2, 3)
    num_pairs: int = 4


class _Steps(Protocol):
    """One kind of step, with its state for some rows."""

    def weigh(self, part: State) -> None:
        """Computes the tables; called first, and again when rows were left out."""

    def step(self, part: State) -> Bools:
        """[n]: make a step; True for rows that may have more to gain."""
        ...

    def keep(self, rows_n: Bools) -> None:
        """Keeps only some rows."""


class _Pairwise:
    """Examines the most promising pairs of devices; `tried_nDD` marks pairs that need not be
    examined."""

    def __init__(self, stage: DescentStage, bundles: list[Ints], tried_nDD: Bools) -> None:
        self._stage, self._bundles, self._tried_nDD = stage, bundles, tried_nDD

    def weigh(self, part: State) -> None:
        """See `_Steps`."""
        self._soft = SoftPeak(part, self._stage.sharpness)

    def step(self, part: State) -> Bools:
        """See `_Steps`."""
        stage, least = self._stage, self._stage.least * part.loads_NDS.shape[2]
        tried_nDD, num_pairs = self._tried_nDD, stage.num_pairs
        return exchange(
            part, self._soft, tried_nDD, self._bundles, num_pairs=num_pairs, least=least
        )

    def keep(self, rows_n: Bools) -> None:
        """See `_Steps`."""
        self._tried_nDD = self._tried_nDD[rows_n]


class _Sweeps:
    """Examines devices that changed against all others; `dirty_nD` marks devices to examine."""

    def __init__(self, stage: DescentStage, dirty_nD: Bools) -> None:
        self._stage, self._dirty_nD = stage, dirty_nD

    def weigh(self, part: State) -> None:
        """See `_Steps`. Single copies change places, so the peak may be sharper."""
        sharpness = self._stage.sharpness * (2 if part.loads_NDS.shape[2] == 1 else 1)
        self._soft = SoftPeak(part, sharpness, LARGEST_OF_ONE)

    def step(self, part: State) -> Bools:
        """See `_Steps`."""
        least = self._stage.least * part.loads_NDS.shape[2]
        return sweep(part, self._soft, self._dirty_nD, least)

    def keep(self, rows_n: Bools) -> None:
        """See `_Steps`."""
        self._dirty_nD = self._dirty_nD[rows_n]


def settle(
    state: State, stage: DescentStage, enough_N: Floats, stop: Stop, same_ND: Bools | None = None
) -> None:
    """Exchanges until no pair of devices promises more; a row whose cost is at most `enough` is
    left as it is. Of the devices in `same_ND` no two are examined until one of them changes."""
    num_rows, num_devices, num_slots = state.slot_NDC.shape
    if same_ND is None:
        same_ND = np.zeros((num_rows, num_devices), dtype=bool)
    bundles = bundles_of(num_slots, stage.sizes)
    is_swept = num_devices > MANY
    if is_swept:
        num_blocks = -(-num_rows * AT_A_TIME * num_devices * num_slots**2 // _MOST_SWEPT)
    else:
        num_cells = stage.num_pairs * max(len(slots_Bm) for slots_Bm in bundles) ** 2
        num_blocks = -(-num_rows * num_cells // _MOST_CELLS)
    costs_N = state.costs()
    for rows in np.array_split(np.arange(num_rows), min(num_blocks, num_rows)):
        steps: _Steps = _Sweeps(stage, ~same_ND[rows])
        if not is_swept:
            same_nDD = same_ND[rows][:, :, None] & same_ND[rows][:, None]
            steps = _Pairwise(stage, bundles, same_nDD)
        _settle(state, rows, steps, enough_N, costs_N, stop)


def _settle(
    state: State, live: Ints, steps: _Steps, enough_N: Floats, costs_N: Floats, stop: Stop
) -> None:
    """Settles the rows `live` together."""
    part = state.take(live)
    steps.weigh(part)
    for _ in range(_MOST_STEPS):
        goes_on_n = steps.step(part)
        costs_N[live] = part.costs()
        goes_on_n &= costs_N[live] > enough_N[live]
        is_stopped = stop(float(costs_N.mean()))
        if goes_on_n.sum() > 0.7 * len(live) and not is_stopped:
            continue
        state.put(live, part, np.arange(len(live)))
        live = live[goes_on_n]
        if not len(live) or is_stopped:
            return
        part = state.take(live)
        steps.keep(goes_on_n)
        steps.weigh(part)
    state.put(live, part, np.arange(len(live)))
