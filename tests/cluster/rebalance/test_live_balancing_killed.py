"""Ranks as processes, killed by SIGKILL while experts move: rolled back, or completed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from moe_serve.cluster.rebalance.mover import Mover
from tests.support.cluster.fault_drive import DEADLINE_S, FaultDrive, fault_config, undisturbed
from tests.support.cluster.layouts import requests
from tests.support.cluster.live_moves import Moves

OF = fault_config(1, 2, rebalance="manual", rebalance_max_moves=64, rebalance_bytes_per_s=4 << 20)
WANTED = requests(4, 4096, num_tokens=12)


@pytest.mark.timeout(400)
def test_killed_in_a_move() -> None:
    """While ranks copy; and when the switch is decided and the loss not known yet. A rank that got
    a step of another placement would end: then more than one were lost."""
    expected = undisturbed(OF, WANTED)
    with FaultDrive(OF) as drive:
        moves = Moves(drive)

        def kill() -> None:
            os.kill(drive.pid("expert-1"), signal.SIGKILL)

        before, target = moves.placement, moves.shuffled(1)
        at = {3: lambda: moves.mover.propose(target), 4: kill}
        assert moves.serve(WANTED, at, until=lambda: bool(moves.ends)) == expected
        assert moves.placement == before and moves.ends[0].num_rounds == 0
        why = str(moves.ends[0].why)  # told by its own connection, or by those of its peers before
        assert "the epoch ended: " in why and "expert-1" in why and "lost" in why
        wait_for_all(drive, num_lost=1)
        switch = Mover._switch

        def kill_and_switch(mover: Mover, move: object) -> None:
            kill()
            switch(mover, move)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Mover, "_switch", kill_and_switch)
            at = {3: lambda: moves.mover.propose(target)}
            answers = moves.serve(WANTED, at, until=lambda: len(moves.ends) == 2)
        assert answers == expected and moves.ends[1].why is None
        assert moves.placement == target
        wait_for_all(drive, num_lost=2)  # which a step may have to notice
        assert moves.serve(WANTED, {}) == expected


def wait_for_all(drive: FaultDrive, num_lost: int) -> None:
    """As `wait_until_complete`, leaving the cores to those who load; after so many losses."""
    end = time.monotonic() + DEADLINE_S
    while drive.membership.num_lost < num_lost or not drive.is_complete or drive.engine.has_work:
        assert time.monotonic() < end, f"not back: {drive.phases()}"
        drive.engine.step()
        time.sleep(0.02)
    assert drive.membership.num_lost == num_lost, "a rank that lived was lost"
