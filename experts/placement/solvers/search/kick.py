"""Makes random changes that keep the rules, to leave a plan that no single change improves.

Shapes as in `state.py`.
"""

from __future__ import annotations

import numpy as np

from experts.placement.solvers.search.exchange import Pairs, allowed_swaps, swap_slots
from experts.placement.solvers.search.recount import best_recounts, put
from experts.placement.solvers.search.soft_peak import SoftPeak
from experts.placement.solvers.search.state import Bools, Floats, Ints, State


def kick_swap(state: State, rows: Ints, random: np.random.Generator) -> None:
    """Swap, in some rows, a random slot of a hot device with a random slot elsewhere."""
    if not len(rows):
        return
    part, index_n = state.take(rows), np.arange(len(rows))
    hot_n = _hot(part, random)
    num_devices = part.slot_NDC.shape[1]
    device_n = (hot_n + random.integers(1, max(2, num_devices), size=len(rows))) % num_devices
    there_nC, back_nC = allowed_swaps(part, Pairs(row_n=index_n, a_n=hot_n, b_n=device_n))
    from_n, leaves_n = _any(there_nC, random)
    to_n, comes_n = _any(back_nC, random)
    live = np.flatnonzero(leaves_n & comes_n & (hot_n != device_n))
    swap_slots(part, live, (hot_n[live], from_n[live]), (device_n[live], to_n[live]))
    if part.rules.budget is not None:
        live = np.flatnonzero(part.new_copies() <= part.rules.budget)
        state.put(rows[live], part, live)
    else:
        state.put(rows, part, index_n)


def kick_recount(state: State, rows: Ints, random: np.random.Generator) -> None:
    """Make, in some rows, one of the recounts that harm least."""
    if not len(rows):
        return
    part = state.take(rows)
    chosen = best_recounts(part, SoftPeak(part, _SHARPNESS), random=random)
    live = np.flatnonzero(np.isfinite(chosen.change_N))
    put(part, live, chosen.expert_N[live], chosen.place_N[live])
    state.put(rows, part, np.arange(len(rows)))


def _hot(state: State, random: np.random.Generator) -> Ints:
    """Draw a device [N], hotter ones with higher probability, in a random scenario."""
    num_rows, num_devices, num_scenarios = state.loads_NDS.shape
    scenario_N = random.integers(num_scenarios, size=num_rows)
    heat_ND = state.loads_NDS[np.arange(num_rows), :, scenario_N]
    noise_ND = random.exponential(_SPREAD, size=(num_rows, num_devices))
    return np.asarray((heat_ND + noise_ND).argmax(axis=1))


_SHARPNESS = 30.0
_SPREAD = 0.02  # difference in even loads within which a device counts as hot


def _any(open_Nn: Bools, random: np.random.Generator) -> tuple[Ints, Bools]:
    """Draw one open entry [N], all with equal probability; the second result says whether there is
    one."""
    ticket_Nn: Floats = np.where(open_Nn, random.random(open_Nn.shape), -1.0)
    chosen_N = ticket_Nn.argmax(axis=1)
    return chosen_N, open_Nn[np.arange(len(open_Nn)), chosen_N]
