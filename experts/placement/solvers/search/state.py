"""The state of many packings of experts into slots, searched in lockstep.

N rows, each a layer or one of several tries at a layer; S scenarios; E experts; D devices; C slots
of the device that has most. Expert number E is "empty": it weighs nothing and may be anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.copies import CopyLoad

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules that moves must keep, by row; index E of an expert is "empty". None means no
    rule."""

    open_NDC: Bools  # slots that exist
    allowed_NED: Bools | None = None  # devices that an expert may be on (grouping)
    pinned_NED: Bools | None = None  # copies that stay
    current_NED: Bools | None = None  # copies of the current plan; empty slots count as present
    budget: int | None = None  # copies beyond `current` that a row may have
    fill: bool = True

    def take(self, rows: Ints) -> Rules:
        """Returns a copy for some rows; a row may occur several times."""
        return Rules(
            open_NDC=self.open_NDC[rows],
            allowed_NED=None if self.allowed_NED is None else self.allowed_NED[rows],
            pinned_NED=None if self.pinned_NED is None else self.pinned_NED[rows],
            current_NED=None if self.current_NED is None else self.current_NED[rows],
            budget=self.budget,
            fill=self.fill,
        )


@dataclass(slots=True, kw_only=True)
class State:
    """The slots and loads of all rows, changed in place. Loads are over a device's speed, in units
    of the even load."""

    load: CopyLoad  # of the rows' layers
    even_SN: Floats
    speed_D: Floats
    rules: Rules
    slot_NDC: Ints  # the expert in each slot
    copies_NE: Ints  # entry E is 1, so that division works
    each_NES: Floats  # load of one copy on a device of speed 1
    loads_NDS: Floats
    free_NED: Bools  # a copy may come here: allowed, and not here yet

    @classmethod
    def empty(cls, load: CopyLoad, speed_D: Floats, rules: Rules) -> State:
        """Makes a state in which no expert is placed."""
        num_rows, num_devices, _ = rules.open_NDC.shape
        num_scenarios, _, num_experts = load.shares_SLE.shape
        allowed = rules.allowed_NED
        shape = (num_rows, num_experts + 1, num_devices)
        return cls(
            load=load,
            even_SN=load.totals() / speed_D.sum(),
            speed_D=speed_D,
            rules=rules,
            slot_NDC=np.full(rules.open_NDC.shape, num_experts),
            copies_NE=np.ones((num_rows, num_experts + 1), dtype=np.int64),
            each_NES=np.zeros((num_rows, num_experts + 1, num_scenarios)),
            loads_NDS=np.zeros((num_rows, num_devices, num_scenarios)),
            free_NED=np.ones(shape, dtype=bool) if allowed is None else allowed.copy(),
        )

    @property
    def num_experts(self) -> int:
        """E, which is also the number of "empty"."""
        return int(self.copies_NE.shape[1]) - 1

    def take(self, rows: Ints) -> State:
        """Returns a copy of some rows; a row may occur several times."""
        return State(
            load=CopyLoad(
                shares_SLE=self.load.shares_SLE[:, rows],
                num_draws=self.load.num_draws,
                top_k=self.load.top_k,
            ),
            even_SN=self.even_SN[:, rows],
            speed_D=self.speed_D,
            rules=self.rules.take(rows),
            **{name: getattr(self, name)[rows] for name in _BY_ROW},
        )

    def put(self, rows: Ints, other: State, others: Ints) -> None:
        """Replaces rows by those of a state that was taken from the same layers."""
        for name in _BY_ROW:
            getattr(self, name)[rows] = getattr(other, name)[others]

    def weigh(self) -> None:
        """Computes the loads of one copy from the numbers of copies."""
        each_SNE = self.load.each(self.load.shares_SLE, self.copies_NE[:, :-1])
        each_SNE /= self.even_SN[:, :, None]
        self.each_NES[:, :-1] = each_SNE.transpose(1, 2, 0)

    def each_with(self, rows: Ints, experts: Ints, copies: Ints) -> Floats:
        """Returns the load of one copy [n, S] if its expert had that many copies."""
        empty = experts == self.num_experts
        shares_Sn = self.load.shares_SLE[:, rows, np.where(empty, 0, experts)]
        each_Sn = self.load.each(shares_Sn, np.maximum(copies, 1)) / self.even_SN[:, rows]
        return np.asarray(np.where(empty, 0.0, each_Sn).T)

    def add_up(self) -> None:
        """Computes everything that follows from `slot_NDC`."""
        num_rows, num_devices, num_slots = self.slot_NDC.shape
        row_N11 = np.arange(num_rows)[:, None, None]
        device_1D1 = np.arange(num_devices)[None, :, None]
        holds_NED = np.zeros(self.free_NED.shape, dtype=bool)
        holds_NED[row_N11, self.slot_NDC, device_1D1] = True
        holds_NED[:, -1] = False
        self.copies_NE = np.maximum(holds_NED.sum(axis=2), 1)
        self.weigh()
        allowed = self.rules.allowed_NED
        self.free_NED = ~holds_NED if allowed is None else allowed & ~holds_NED
        self.loads_NDS = self.each_NES[row_N11, self.slot_NDC].sum(axis=2)
        self.loads_NDS /= self.speed_D[None, :, None]

    def peaks(self) -> Floats:
        """Returns [N, S]: the largest load of a device."""
        return np.asarray(self.loads_NDS.max(axis=1))

    def costs(self) -> Floats:
        """Returns [N]: the objective of a row."""
        return np.asarray(self.peaks().mean(axis=1))

    def new_copies(self) -> Ints:
        """Returns [N]: copies that the current plan lacks."""
        current = self.rules.current_NED
        assert current is not None, "the rules have no current plan"
        row_N11 = np.arange(len(self.slot_NDC))[:, None, None]
        device_1D1 = np.arange(self.slot_NDC.shape[1])[None, :, None]
        return np.asarray((~current[row_N11, self.slot_NDC, device_1D1]).sum(axis=(1, 2)))

    def check_integrity(self) -> None:
        """Raises AssertionError if the values that moves update differ from those that follow from
        the slots."""
        fresh = self.take(np.arange(len(self.slot_NDC)))
        fresh.add_up()
        assert np.array_equal(fresh.copies_NE, self.copies_NE), "copies_NE does not match slot_NDC"
        assert np.array_equal(fresh.free_NED, self.free_NED), "free_NED does not match slot_NDC"
        worst = float(np.abs(fresh.loads_NDS - self.loads_NDS).max())
        assert worst < 1e-9, f"loads differ by {worst} from those of slot_NDC"


_BY_ROW = ("slot_NDC", "copies_NE", "each_NES", "loads_NDS", "free_NED")
assert {field.name for field in fields(State)} >= set(_BY_ROW), "names of State"
