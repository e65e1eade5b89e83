"""Autoscaling of a running server: its decisions on a clock and starts that a test controls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import msgspec
import pytest

import moe_serve.cluster.autoscale.policies as policies
from moe_serve.bench import scaling as simulated
from moe_serve.cluster.autoscale import scaler_maker
from moe_serve.cluster.autoscale.live_scaler import LiveScaler
from moe_serve.cluster.autoscale.scale_plan import PlannedRole, ScalePlan, write_plan
from moe_serve.config.cells import CellsConfig, parse_cell, parse_cells
from moe_serve.config.keys import check_engine_config
from moe_serve.config.sections import EngineConfig, SchedulerConfig
from moe_serve.engine.request.request import FinishReason, TokenDelta
from moe_serve.engine.request.stats import (
    CellState,
    CellStatus,
    EngineCounts,
    EngineLoad,
    EngineStats,
)
from moe_serve.engine.watch.cells_control import ANYWHERE, CellPlace, NodeStatus
from moe_serve.errors import CellsError, ConfigError


class Server:
    """Implements CellsControl over cells whose states and loads a test sets. Each has 4 seats."""

    def __init__(self, layout: str = "1x(1A1E)", **settings: object) -> None:
        self.now = 0.0
        self.cells: dict[int, CellStatus] = {}
        self.counts, self.refusal = EngineCounts(), ""
        self._numbers: Iterator[int] = count()
        fields = {"autoscale": "target", "max_cells": 3, "scale_every_s": 10.0, "calm_s": 60.0}
        cells = CellsConfig(layout=layout, **{**fields, **settings})  # type: ignore[arg-type]
        config = EngineConfig(cells=cells, scheduler=SchedulerConfig(max_num_seqs=4))
        check_engine_config(config)
        for shape in parse_cells(layout):
            self.serve(self.add_cell(str(shape)))
        policy = scaler_maker.scale_policy(cells)
        scaler = scaler_maker.make_scaler(config, policy, 5.0, lambda: self.now)
        assert scaler is not None
        self.scaler: LiveScaler = scaler
        scaler.use(lambda: EngineStats(counts=self.counts, cells=tuple(self.cells.values())), self)

    def add_cell(
        self, shape: str, *, number: int | None = None, place: CellPlace = ANYWHERE
    ) -> int:
        if self.refusal:
            raise CellsError(self.refusal)
        index, wanted = next(self._numbers), parse_cell(shape)
        self.cells[index] = CellStatus(
            name=f"cell-{index}", role=wanted.role, ranks=wanted.ranks, state="starting"
        )
        return index

    def remove_cell(self, index: int) -> None:
        if self.cells[index].state == "failed":
            del self.cells[index]
        else:
            self.set(index, "leaving")

    def drain(self, index: int, *, is_draining: bool) -> None: ...

    def drain_rank(self, name: str, *, is_draining: bool) -> None: ...

    def nodes(self) -> tuple[NodeStatus, ...]:
        return ()

    def set(self, index: int, state: CellState, note: str = "") -> None:
        self.cells[index] = replace(self.cells[index], state=state, note=note)

    def serve(self, index: int) -> None:
        self.set(index, "serving")
        self.load(**{f"_{index}": 0})

    def load(self, **requests: int) -> None:
        """Sets the requests of cells, such as `_0=5`."""
        for name, num in requests.items():
            load = EngineLoad(
                num_running=min(4, num),
                num_waiting=max(0, num - 4),
                num_pages=100,
                num_free_pages=100 - 10 * min(4, num),
            )
            self.cells[int(name[1:])] = replace(self.cells[int(name[1:])], load=load)

    def run(self, seconds: float) -> None:
        """Lets time pass, with a turn in every second."""
        for _ in range(round(seconds)):
            self.now += 1.0
            self.scaler.turn()

    def states(self) -> list[str]:
        return [cell.state for cell in self.cells.values()]

    @property
    def last(self) -> str:
        return self.scaler.stats().last

    def num(self, action: str) -> int:
        return self.scaler.stats().num_decisions.get(action, 0)  # type: ignore[call-overload, no-any-return]


def test_a_cell_comes_with_the_load_and_goes_when_it_was_not_needed_for_a_while() -> None:
    server = Server()
    server.load(_0=6)
    server.run(10)
    assert server.states() == ["serving", "starting", "starting"]
    assert server.last == (
        "cells of the role both: 3 wanted, 1 there, as 150% of the seats were taken "
        "in the last 10 s and 0 requests/s came; (1A1E both) is added as cell-1, cell-2."
    )
    server.run(20)
    assert (server.states().count("starting"), server.num("add")) == (2, 1), "it waits for them"
    for index in (1, 2):
        server.serve(index)
    server.load(_0=0)
    server.run(50)
    assert server.states() == ["serving"] * 3, "fewer have not been wanted for long enough"
    server.run(20)
    assert server.states() == ["serving", "leaving", "leaving"], "the newest leave, and one stays"
    assert "cell-1 with 0 requests leaves" in server.last
    assert server.scaler.stats().wanted == {"both": 1}


def test_a_start_that_fails_is_tried_again_later_and_later() -> None:
    server = Server(max_cells=2, scale_every_s=30.0)
    server.load(_0=8)
    server.run(30)
    server.set(1, "failed", "no place for attention-0")
    server.run(1)
    assert server.last == (
        "cell-1 could not start (1 in turn), and no cell is added for the next 60 s: no place for "
        "attention-0."
    )
    server.run(49)
    assert server.states() == ["serving", "failed"] and "no cell is added for" in server.last
    said = server.scaler.stats().num_said
    server.run(10)
    assert server.num("hold") == 2
    assert server.scaler.stats().num_said == said, "what cannot be had is said once"
    server.run(30)
    assert list(server.cells) == [0, 2], "the one that failed is taken off the list"
    server.refusal = "no memory is free"
    server.set(2, "failed", "no memory is free")
    server.run(1)
    assert "(2 in turn), and no cell is added for the next 120 s" in server.last
    server.run(150)
    assert "(3 in turn)" in server.last and server.num("failed") == 3, "it is refused at once"
    server.run(100)
    assert (server.states(), server.num("add")) == (["serving"], 2)


def test_a_cell_that_is_needed_stays() -> None:
    """The policy wants fewer cells, and the requests of this moment fill the seats, or a cell
    cannot compute."""
    server = Server("1x(1A1E) 1x(1A1E)", target_load=1.0)
    server.run(69)
    server.load(_0=3, _1=2)
    server.run(1)
    assert server.states() == ["serving", "serving"]
    assert server.last.endswith("but the others have no room for the requests.")
    server.load(_0=1, _1=0)
    server.cells[0] = replace(server.cells[0], outage_s=3.0)
    server.run(20)
    assert server.states() == ["serving", "serving"] and server.num("remove") == 0
    server.cells[0] = replace(server.cells[0], outage_s=0.0)
    server.run(10)
    assert server.states() == ["serving", "leaving"]


def test_what_the_changes_of_an_hour_do_not_allow_is_said() -> None:
    server = Server(max_changes=1)
    server.load(_0=4)
    server.run(10)
    server.serve(1)
    server.load(_0=6, _1=6)
    server.run(50)
    assert server.states() == ["serving", "serving"]
    assert server.last.endswith("but the changes of this hour are used up (cells.max_changes).")
    assert server.scaler.stats().wanted == {"both": 3}
    server.run(3600)
    assert server.states() == ["serving", "serving", "starting"]


def test_only_the_roles_that_are_named_are_scaled_and_never_below_the_least() -> None:
    server = Server(
        "1x(1A1E prefill) 1x(1A1E decode) 1x(1A1E decode)", added="1A1E decode", min_cells=2
    )
    server.load(_0=12)
    server.run(100)
    assert server.states() == ["serving"] * 3
    server.load(_1=6, _2=6)
    server.run(10)
    assert (server.states(), server.cells[3].role) == (["serving"] * 3 + ["starting"], "decode")


def plan_of(folder: Path, **fields: object) -> str:
    role = PlannedRole(ranks="1A1E", prompt_tok_s=1000.0, output_tok_s=100.0, most_load=(0.5, 0.6))
    plan = ScalePlan(slo="ttft=1s", prompt_tokens=500, output_tokens=50, roles={"both": role})
    write_plan(msgspec.structs.replace(plan, **fields), folder / "plan.json")
    return str(folder / "plan.json")


def test_planned_counts_requests_and_their_tokens(tmp_path: Path) -> None:
    """A request of 500 and 50 tokens takes a second of a cell; one cell may be filled to a half."""
    server = Server(autoscale="planned", scale_plan=plan_of(tmp_path))
    for number in range(9):
        server.scaler.request_came()
        server.scaler.note([TokenDelta(request_id=str(number), token_ids=(1,) * 20)])
        ended = TokenDelta(
            request_id=str(number), token_ids=(1,) * 30, finish_reason=FinishReason.LENGTH
        )
        server.scaler.note([ended])
    server.counts = EngineCounts(num_missed_tokens=9 * 500)
    server.run(10)
    assert server.states() == ["serving", "starting"]
    assert server.last.startswith("cells of the role both: 2 wanted, 1 there, as 0%")
    assert "0.9 requests/s came" in server.last


def test_planned_reacts_within_an_interval_on_a_server_that_was_idle(tmp_path: Path) -> None:
    """After half an hour without requests 2 come in a second, for which the plan has 4 cells."""
    plan = plan_of(tmp_path)
    server = Server(autoscale="planned", scale_plan=plan, max_cells=4, scale_every_s=30.0)
    server.run(1800)
    assert server.states() == ["serving"]
    for _ in range(60):
        server.scaler.request_came()
    server.run(30)
    assert server.states() == ["serving", "starting", "starting"]


def test_a_plan_for_other_cells_or_with_nonsense_is_refused(tmp_path: Path) -> None:
    of = CellsConfig(layout="1x(1A2E)", autoscale="planned", max_cells=2)
    with pytest.raises(ConfigError, match=r"adds \(1A2E both\), and the plan has 1A1E"):
        scaler_maker.scale_policy(replace(of, scale_plan=plan_of(tmp_path)))
    wrong: list[dict[str, object]] = [{"prompt_tokens": 0.0}, {"version": 2}, {"roles": {}}]
    for fields in wrong:
        with pytest.raises(ConfigError, match="cannot be used as a plan"):
            scaler_maker.scale_policy(replace(of, scale_plan=plan_of(tmp_path, **fields)))
    (tmp_path / "plan.json").write_text('{"slo": 1}')
    with pytest.raises(ConfigError, match="is not a plan of moe-serve simulate --plan-out"):
        scaler_maker.scale_policy(replace(of, scale_plan=str(tmp_path / "plan.json")))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"max_cells": 3}, "cells.max_cells is 3, but cells.autoscale is static"),
        ({"autoscale": "target", "layout": None}, "there are no cells: set cells.layout"),
        ({"autoscale": "target"}, "needs a limit: set cells.max_cells"),
        ({"autoscale": "target", "max_cells": 1, "min_cells": 2}, "must not be larger"),
        ({"autoscale": "target", "max_cells": 1, "layout": "2x(1A1E)"}, "has 2 cells of the role"),
        ({"autoscale": "planned", "max_cells": 2}, "needs a plan: set cells.scale_plan"),
        ({"autoscale": "target", "max_cells": 2, "scale_plan": "p"}, "uses no plan"),
        ({"autoscale": "target", "max_cells": 2, "added": "1A1E decode"}, "no cell of the role"),
        ({"autoscale": "target", "max_cells": 2, "added": "2x(1A1E)"}, "more than one cell"),
    ],
)
def test_settings_that_contradict_are_refused(fields: dict[str, object], why: str) -> None:
    cells = CellsConfig(**{"layout": "1x(1A1E)", **fields})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=why):
        check_engine_config(EngineConfig(cells=cells))


def test_a_server_and_a_simulation_use_the_same_policies_and_limits() -> None:
    for name in ("TargetPolicy", "PlannedPolicy"):
        own = getattr(policies, name)
        assert getattr(scaler_maker, name) is getattr(simulated, name) is own
    assert vars(scaler_maker)["Autoscaler"] is vars(simulated)["Autoscaler"]
