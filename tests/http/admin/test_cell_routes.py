"""The routes of cells: who may use them, what they list, and what a refusal says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from moe_serve.config.cells import parse_cell
from moe_serve.config.sections import ServerConfig
from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.request.stats import CellState, CellStatus, EngineLoad, EngineStats
from moe_serve.engine.watch.cells_control import ANYWHERE, CellPlace, NodeStatus
from moe_serve.errors import CellsError, UnknownCellError
from moe_serve.http.app import create_app
from moe_serve.http.generation.served_model import ServedModel

ADMIN = {"Authorization": "Bearer root"}


class FakeCells:
    """Two cells, of which one must take requests."""

    def __init__(self) -> None:
        self.states: dict[int, CellState] = {0: "serving", 1: "serving"}
        self.added: list[tuple[str, int | None, CellPlace]] = []
        self.ranks: dict[str, bool] = {}

    def add_cell(
        self, shape: str, *, number: int | None = None, place: CellPlace = ANYWHERE
    ) -> int:
        parse_cell(shape)
        self.added.append((shape, number, place))
        self.states[2] = "starting"
        return 2

    def remove_cell(self, index: int) -> None:
        if index not in self.states:
            raise UnknownCellError(f"There is no cell {index}.")
        if index == 2:
            del self.states[index]
        else:
            self.states[index] = "leaving"

    def drain(self, index: int, *, is_draining: bool) -> None:
        if is_draining and self.states[1 - index] == "draining":
            raise CellsError("Cell 1 is not drained: it is the only one that takes requests.")
        self.states[index] = "draining" if is_draining else "serving"

    def drain_rank(self, name: str, *, is_draining: bool) -> None:
        self.ranks[name] = is_draining

    def nodes(self) -> tuple[NodeStatus, ...]:
        return (NodeStatus(name="gpu-b", num_ranks=1, num_places=4, is_there=True,
                           cells=("cell-1",)),)  # fmt: skip

    def stats(self) -> EngineStats:
        cells = [
            CellStatus(
                name=f"cell-{index}",
                role="both",
                ranks="1A1E",
                state=state,
                load=EngineLoad(num_running=index, num_pages=4, num_free_pages=3),
                commands=("start it",) if state == "starting" else (),
            )
            for index, state in self.states.items()
        ]
        return EngineStats(cells=tuple(cells))


@pytest.fixture
def cells() -> FakeCells:
    return FakeCells()


@pytest.fixture
def client(
    engine: EngineClient, model: ServedModel, cells: FakeCells, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TestClient]:
    stats = engine.stats
    monkeypatch.setattr(engine, "stats", lambda: replace(stats(), cells=cells.stats().cells))
    app = create_app(engine, model, ServerConfig(admin_keys=("root",)), cells=cells)
    with TestClient(app) as opened:
        yield opened


def test_an_operator_lists_drains_and_undrains_cells(client: TestClient) -> None:
    assert client.get("/admin/cells").status_code == 401
    first, second = client.get("/admin/cells", headers=ADMIN).json()["cells"]
    assert (first["name"], second["running"], second["kv_used"]) == ("cell-0", 1, 0.25)
    answer = client.post("/admin/cells/0/drain", headers=ADMIN).json()
    assert [cell["is_draining"] for cell in answer["cells"]] == [True, False]
    assert answer["cell"]["state"] == "draining"
    refused = client.post("/admin/cells/1/drain", headers=ADMIN)
    assert refused.status_code == 409
    assert "the only one that takes requests" in refused.json()["error"]["message"]
    unknown = client.post("/admin/cells/first/drain", headers=ADMIN)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "route_not_found")
    answer = client.post("/admin/cells/0/undrain", headers=ADMIN).json()
    assert not any(cell["is_draining"] for cell in answer["cells"])
    state = client.get("/dashboard/state").json()
    assert [cell["name"] for cell in state["cells"]] == ["cell-0", "cell-1"]
    assert all("commands" not in cell for cell in state["cells"]), "they need an admin key"


def test_an_operator_adds_and_removes_cells(client: TestClient, cells: FakeCells) -> None:
    body = {"shape": "1A1E decode", "number": 2, "by_hand": True, "node": "gpu-b"}
    assert client.post("/admin/cells", json=body).status_code == 401
    answer = client.post("/admin/cells", json=body, headers=ADMIN)
    place = CellPlace(by_hand=True, node="gpu-b")
    assert answer.status_code == 202 and cells.added == [("1A1E decode", 2, place)]
    (node,) = answer.json()["nodes"]
    assert node == {
        "name": "gpu-b", "num_ranks": 1, "num_places": 4, "is_there": True, "cells": ["cell-1"]
    }  # fmt: skip
    assert [cell["nodes"] for cell in answer.json()["cells"]] == [[], ["gpu-b"], []]
    assert answer.json()["autoscale"] is None
    assert answer.json()["cell"]["state"] == "starting"
    assert answer.json()["cell"]["commands"] == ["start it"] and len(answer.json()["cells"]) == 3
    answer = client.delete("/admin/cells/1", headers=ADMIN)
    assert (answer.status_code, answer.json()["cell"]["state"]) == (202, "leaving")
    answer = client.delete("/admin/cells/2", headers=ADMIN)
    assert answer.json()["cell"] == {"name": "cell-2", "state": "gone"}
    unknown = client.delete("/admin/cells/7", headers=ADMIN)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "cell_not_found")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "shape"),
        ({"shape": 7}, "shape"),
        ({"shape": "2x(1A1E)"}, "shape"),
        ({"shape": "1A1E", "number": -1}, "number"),
        ({"shape": "1A1E", "number": True}, "number"),
        ({"shape": "1A1E", "by_hand": "yes"}, "by_hand"),
        ({"shape": "1A1E", "node": 1}, "node"),
        ({"shape": "1A1E", "role": "decode"}, "role"),
    ],
)
def test_a_wrong_field_is_named(
    client: TestClient, cells: FakeCells, body: dict[str, object], param: str
) -> None:
    answer = client.post("/admin/cells", json=body, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not cells.added


def test_one_rank_drains(client: TestClient, cells: FakeCells) -> None:
    for verb, is_draining in (("drain", True), ("undrain", False)):
        answer = client.post(f"/admin/ranks/cell-1/attention-0/{verb}", headers=ADMIN)
        assert answer.status_code == 200 and cells.ranks == {"cell-1/attention-0": is_draining}
    assert client.post("/admin/ranks/cell-1/attention-0/drain").status_code == 401


def test_a_server_with_one_cell_says_so(engine: EngineClient, model: ServedModel) -> None:
    with TestClient(create_app(engine, model, ServerConfig(admin_keys=("root",)))) as client:
        answer = client.get("/admin/cells", headers=ADMIN)
        assert answer.status_code == 409
        assert "Start it with several cells in --cells" in answer.json()["error"]["message"]
