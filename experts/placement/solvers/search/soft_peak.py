"""A smooth version of the largest load over devices: log of the sum of exp(beta x load), over beta.

Swaps are evaluated for all scenarios at once by products of small matrices, because the exponential
of a changed load is a product of exponentials. The sum over scenarios of the logarithms is concave
in each sum, so a change that lowers their linear part lowers it. Shapes as in `state.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experts.placement.solvers.search.state import Bools, Floats, Ints, State

_LARGEST_EXPONENT = 200.0  # of one copy; the product of three such exponentials stays finite
LARGEST_OF_ONE = 600.0  # the same if copies change places one by one
FORBIDDEN = 1e30  # larger than any sum of a useful swap
# exponents by which a load is out of reach: more than all devices and scenarios can lose together
_FAR_ABOVE = 14.0


class SoftPeak:
    """The soft peak of the rows as they are; call `weigh` again when numbers of copies have
    changed."""

    def __init__(
        self, state: State, sharpness: float | Floats, largest: float = _LARGEST_EXPONENT
    ) -> None:
        """`sharpness` is for all rows, or [N]; it is reduced if a copy's exponent would exceed
        `largest`."""
        self._sharpness, self._largest = sharpness, largest
        self._class_D = np.unique(state.speed_D, return_inverse=True)[1]
        self._speeds = np.unique(state.speed_D)
        self.weigh(state)

    def weigh(self, state: State) -> None:
        """Computes the tables of exp(+-beta x load of a copy on a device of a speed)."""
        heaviest_N = state.each_NES.max(axis=(1, 2)) / self._speeds[0]
        self._beta_N = np.minimum(self._sharpness, self._largest / heaviest_N)
        exponent_NES = self._beta_N[:, None, None] * state.each_NES
        exponent_KNES = exponent_NES / self._speeds[:, None, None, None]
        self._up_KNES, self._down_KNES = np.exp(exponent_KNES), np.exp(-exponent_KNES)

    def weighed(self, loads_NDS: Floats) -> Floats:
        """Returns [N, D, S]: exp(beta x load) over its sum in the scenario."""
        peak_N1S = loads_NDS.max(axis=1, keepdims=True)
        heat_NDS = np.exp(self._beta_N[:, None, None] * (loads_NDS - peak_N1S))
        heat_NDS /= heat_NDS.sum(axis=1, keepdims=True)
        return np.asarray(heat_NDS)

    def change(self, state: State, loads_NnS: Floats, shift_NnS: Floats) -> Floats:
        """[N, n, S]: change of the linear part when loads of devices shift. A load far above the
        peak cannot be compensated, so its exact height is ignored."""
        peak_N1S = state.loads_NDS.max(axis=1, keepdims=True)
        beta_N11 = self._beta_N[:, None, None]
        sum_N1S = np.exp(beta_N11 * (state.loads_NDS - peak_N1S)).sum(axis=1, keepdims=True)
        before_NnS = np.exp(beta_N11 * (loads_NnS - peak_N1S))
        exponent_NnS = beta_N11 * (loads_NnS + shift_NnS - peak_N1S)
        after_NnS = np.exp(np.minimum(exponent_NnS, _FAR_ABOVE))
        return np.asarray((after_NnS - before_NnS) / sum_N1S)

    def pair_tables(
        self, state: State, weighed_NDS: Floats, row_n: Ints, a_n: Ints, b_n: Ints
    ) -> PairTables:
        """Returns the tables of the copies on devices a and b."""
        row_n1 = row_n[:, None]
        a_nC, b_nC = state.slot_NDC[row_n, a_n], state.slot_NDC[row_n, b_n]
        class_a_n1, class_b_n1 = self._class_D[a_n][:, None], self._class_D[b_n][:, None]
        return PairTables(
            leave_a_nCS=self._down_KNES[class_a_n1, row_n1, a_nC],
            come_b_nCS=self._up_KNES[class_b_n1, row_n1, a_nC],
            come_a_nCS=self._up_KNES[class_a_n1, row_n1, b_nC],
            leave_b_nCS=self._down_KNES[class_b_n1, row_n1, b_nC],
            weight_a_nS=weighed_NDS[row_n, a_n],
            weight_b_nS=weighed_NDS[row_n, b_n],
        )

    def against_all(self, state: State, weighed_NDS: Floats, row_n: Ints, device_n: Ints) -> Floats:
        """[n, C, P]: change of the linear part when a slot of a device swaps with any slot."""
        num_rows, _, num_slots = state.slot_NDC.shape
        slot_NP = state.slot_NDC.reshape(num_rows, -1)
        row_N1, row_n1 = np.arange(num_rows)[:, None], row_n[:, None]
        class_P, class_n = np.repeat(self._class_D, num_slots), self._class_D[device_n]
        mine_nC = state.slot_NDC[row_n, device_n]
        weight_NPS = np.repeat(weighed_NDS, num_slots, axis=1)
        weight_nS = weighed_NDS[row_n, device_n]
        gone_nCS = self._down_KNES[class_n[:, None], row_n1, mine_nC] * weight_nS[:, None]
        left_NPS = self._down_KNES[class_P, row_N1, slot_NP] * weight_NPS
        before_NP = weight_NPS.sum(axis=2)
        if len(self._speeds) == 1:
            # One product of small matrices: gone x come + come x left - before.
            come_NPS = self._up_KNES[0][row_N1, slot_NP]
            theirs_NPK = np.concatenate((come_NPS, left_NPS, -before_NP[:, :, None]), axis=2)
            come_nCS = self._up_KNES[0][row_n1, mine_nC]
            one_nC1 = np.ones((*mine_nC.shape, 1))
            mine_nCK = np.concatenate((gone_nCS, come_nCS, one_nC1), axis=2)
            theirs_NKP = np.ascontiguousarray(theirs_NPK.transpose(0, 2, 1))
            change_nCP = mine_nCK @ theirs_NKP[row_n]
        else:
            come_nPS = self._up_KNES[class_n[:, None], row_n1, slot_NP[row_n]]
            change_nCP = gone_nCS @ come_nPS.transpose(0, 2, 1)
            for slot, mine_n in enumerate(mine_nC.T):
                come_nPS = self._up_KNES[class_P, row_n1, mine_n[:, None]]
                change_nCP[:, slot] += (come_nPS * left_NPS[row_n]).sum(axis=2) - before_NP[row_n]
        change_nCP -= weight_nS.sum(axis=1)[:, None, None]
        return np.asarray(change_nCP)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTables:
    """For n pairs of devices: the factors by which single copies multiply the exponentials."""

    leave_a_nCS: Floats  # to multiply with the weight of a
    come_b_nCS: Floats
    come_a_nCS: Floats
    leave_b_nCS: Floats  # to multiply with the weight of b
    weight_a_nS: Floats
    weight_b_nS: Floats

    def before(self) -> Floats:
        """[n]: the linear part as it is."""
        return np.asarray((self.weight_a_nS + self.weight_b_nS).sum(axis=1))

    def after(self, slots_Bm: Ints, there_nB: Bools, back_nB: Bools) -> Floats:
        """[n, B, B]: the linear part when bundles of a and b swap; at least `FORBIDDEN` if a swap
        is not allowed.

        This is one product of matrices, with one extra column each for copies that may not leave
        and may not arrive.
        """
        gone_nBS = _product(self.leave_a_nCS, slots_Bm) * self.weight_a_nS[:, None]
        come_nBS = _product(self.come_b_nCS, slots_Bm)
        forbidden_nB1 = np.where(there_nB, 0.0, FORBIDDEN)[:, :, None]
        one_nB1 = np.ones_like(forbidden_nB1)
        left_nBS = np.concatenate((gone_nBS, come_nBS, forbidden_nB1, one_nB1), axis=2)
        come_nBS = _product(self.come_a_nCS, slots_Bm)
        gone_nBS = _product(self.leave_b_nCS, slots_Bm) * self.weight_b_nS[:, None]
        forbidden_nB1 = np.where(back_nB, 0.0, FORBIDDEN)[:, :, None]
        right_nBS = np.concatenate((come_nBS, gone_nBS, one_nB1, forbidden_nB1), axis=2)
        return np.asarray(left_nBS @ right_nBS.transpose(0, 2, 1))


def _product(part_nCS: Floats, slots_Bm: Ints) -> Floats:
    result = part_nCS[:, slots_Bm[:, 0]]
    for slot_B in slots_Bm.T[1:]:
        result = result * part_nCS[:, slot_B]
    return result
